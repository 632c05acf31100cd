"""Ends an engine whose step loop makes no progress.

A hung device raises no error, and a supervisor can restart the process only after it has exited. Frontends move its
requests to other engines, so that none is lost.
"""

import sys
import threading
from collections.abc import Callable
from types import FrameType

from engine.errors import DeviceError

_CHECK_INTERVAL_S = 1.0


class Watchdog:
    """Checks the progress of the step loop from a separate thread.

    Time is counted in checks, not by the clock: a suspended process or machine is not a hang.

    Args:
        mark: returns a value that changes with any progress of the loop.
        timeout_s: how long the value may stay the same; 0 disables the watchdog.
        on_hang: called once, on the watchdog's thread, with the error; may end the process.
        thread_id: thread of the step loop, to report where it hangs.
        reason: probable cause, for the error message.
        check_interval_s: interval between two checks.
    """

    def __init__(
        self,
        mark: Callable[[], object],
        timeout_s: float,
        on_hang: Callable[[DeviceError], None],
        *,
        thread_id: int,
        reason: str = "the device hangs, or a step takes longer than --step-timeout allows",
        check_interval_s: float = _CHECK_INTERVAL_S,
    ) -> None:
        self._mark = mark
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._thread_id = thread_id
        self._reason = reason
        self._check_interval_s = check_interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        seen, num_same = self._mark(), 0
        while not self._ended.wait(self._check_interval_s):
            mark = self._mark()
            num_same = num_same + 1 if mark == seen else 0
            seen = mark
            if num_same * self._check_interval_s >= self._timeout_s:
                self._on_hang(DeviceError(self._message()))
                return

    def _message(self) -> str:
        place = _place(sys._current_frames().get(self._thread_id))
        return f"the step loop has made no progress for {self._timeout_s:g} s{place}: {self._reason}"


def _place(frame: FrameType | None) -> str:
    """Describes the innermost frame of the engine, and the innermost of all."""
    if frame is None:
        return ""
    innermost = own = frame
    while own.f_back is not None and not own.f_globals.get("__name__", "").startswith(("engine.", "kernels.")):
        own = own.f_back
    code = own.f_code
    where = f", in {own.f_globals.get('__name__', '?')}.{code.co_name} (line {own.f_lineno})"
    if own is not innermost:
        where += f", which is in {innermost.f_globals.get('__name__', '?')}.{innermost.f_code.co_name}"
    return where
