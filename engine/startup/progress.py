"""How far the start is, for people: in the log, on a terminal and in the engine's status, all from one place.

A start is a sequence of phases. What is being done is told at once; whoever watches a log file hears of a phase that
takes long every few seconds, and at a terminal one line is written over and over.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

SILENCE_S = 5.0
"""How long the log may be silent while a phase lasts."""

_TICK_S = 0.5
_MIN_GAP_S = 0.1  # between two tellings within a phase: a tensor may take a microsecond

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def _nobody(_: str) -> None:
    """Is told, and does nothing."""


def _go_on() -> None:
    """Raises nothing."""


class Startup:
    """Told by those who load; passes it on to those who wait. Any thread may tell.

    Args:
        tell: gets what is being done: "loading weights 43 %".
        show: shows a line on a terminal in place of the one before, "" for none; None: nobody watches.
        began_at_s: when the start began, time.monotonic(); None: now.
        check: called by whoever tells; raises if the start is to end.
    """

    def __init__(
        self,
        tell: Callable[[str], None] = _nobody,
        show: Callable[[str], None] | None = None,
        *,
        began_at_s: float | None = None,
        check: Callable[[], None] = _go_on,
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
        """A phase begins, and the one before has ended.

        Args:
            phase: its name in the breakdown; of the same name there may be several.
            doing: what is being done.
        """
        self._check()
        with self._lock:
            now_s = time.monotonic()
            self._close_phase(now_s)
            self._phase = phase
            self._doing = doing
            self._say(now_s)

    def at(self, doing: str) -> None:
        """The phase has come so far."""
        self._check()
        with self._lock:
            self._doing = doing
            now_s = time.monotonic()
            if now_s - self._told_at_s >= _MIN_GAP_S:
                self._say(now_s)

    def count(self, iterable: Iterable[_T], /, *, desc: str, total: int) -> Iterator[_T]:
        """Yields what the iterable does, and tells how many there were: a `kernels.gpu.progress.Progress`."""
        self.at(f"{desc} 0 of {total}")
        for number, item in enumerate(iterable, 1):
            yield item
            self.at(f"{desc} {number} of {total}")

    def phase_s(self) -> float:
        """How long the phase has lasted."""
        return time.monotonic() - self._phase_began_at_s

    def end(self) -> str:
        """The last phase has ended; returns what took how long: "3.1 s (weights 2.0, kernels 1.1)"."""
        with self._lock:
            now_s = time.monotonic()
            self._close_phase(now_s)
            self._phase = self._doing = ""
            parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._seconds.items())
            return f"{now_s - self._began_at_s:.1f} s ({parts})"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, a phase that takes long is heard of."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="startup", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if self._show is not None:
                self._show("")

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_TICK_S):
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
