"""Reports the progress of the start in the log, on a terminal and in the engine's status.

A start is a sequence of phases. The current activity is reported at once; a long phase is also logged every few
seconds, or on a terminal shown in one line that is rewritten.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

SILENCE_S = 5.0
"""Longest time without a log line during a phase."""

_TICK_S = 0.5
_MIN_INTERVAL_S = 0.1  # between two reports within a phase: a tensor may take a microsecond

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def _ignore(_: str) -> None:
    """Reports nothing."""


def _continue() -> None:
    """Never raises."""


class StartupProgress:
    """Receives the progress from loading code and reports it. Any thread may call it.

    Args:
        tell: called with the current activity, such as "loading weights 43 %".
        show: replaces the line on a terminal, "" clears it; None: no terminal.
        began_at_s: start time, time.monotonic(); None: now.
        check: called with every update; raises if the start must be aborted.
    """

    def __init__(
        self,
        tell: Callable[[str], None] = _ignore,
        show: Callable[[str], None] | None = None,
        *,
        began_at_s: float | None = None,
        check: Callable[[], None] = _continue,
    ) -> None:
        self._tell = tell
        self._show = show
        self._check = check
        self._lock = threading.Lock()
        self._began_at_s = time.monotonic() if began_at_s is None else began_at_s
        self._phase = ""
        self._phase_began_at_s = self._began_at_s
        self._doing = ""
        self._told = ""
        self._told_at_s = self._logged_at_s = self._began_at_s
        self._seconds: dict[str, float] = {}

    def begin(self, phase: str, doing: str) -> None:
        """Ends the current phase and begins the next.

        Args:
            phase: name in the breakdown; phases of the same name are summed.
            doing: current activity.
        """
        self._check()
        with self._lock:
            now_s = time.monotonic()
            self._close_phase(now_s)
            self._phase = phase
            self._doing = doing
            self._say(now_s)

    def update(self, doing: str) -> None:
        """Updates the activity within the phase."""
        self._check()
        with self._lock:
            self._doing = doing
            now_s = time.monotonic()
            if now_s - self._told_at_s >= _MIN_INTERVAL_S:
                self._say(now_s)

    def count(self, iterable: Iterable[_T], /, *, desc: str, total: int) -> Iterator[_T]:
        """Iterates and reports the count; implements `kernels.gpu.progress.Progress`."""
        self.update(f"{desc} 0 of {total}")
        for number, item in enumerate(iterable, 1):
            yield item
            self.update(f"{desc} {number} of {total}")

    def phase_s(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self._phase_began_at_s

    def end(self) -> str:
        """Ends the last phase and returns the breakdown: "3.1 s (weights 2.0, kernels 1.1)"."""
        with self._lock:
            now_s = time.monotonic()
            self._close_phase(now_s)
            self._phase = self._doing = ""
            parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._seconds.items())
            return f"{now_s - self._began_at_s:.1f} s ({parts})"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Logs or shows long phases while the context is open."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="startup", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if self._show is not None:
                self._show("")

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_S):
            with self._lock:
                now_s = time.monotonic()
                if not self._doing:
                    continue
                self._say(now_s)
                if self._show is None and now_s - self._logged_at_s >= SILENCE_S:
                    self._logged_at_s = now_s
                    _log.info("%s ... %.0f s", self._doing, now_s - self._phase_began_at_s)

    def _say(self, now_s: float) -> None:
        if self._doing != self._told:
            self._told, self._told_at_s = self._doing, now_s
            self._tell(self._doing)
        if self._show is not None:
            self._show(f"{self._doing} ... {now_s - self._phase_began_at_s:.0f} s")

    def _close_phase(self, now_s: float) -> None:
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._phase_began_at_s
        self._phase_began_at_s = self._logged_at_s = now_s
