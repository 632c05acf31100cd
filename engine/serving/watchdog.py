"""Ends an engine whose step loop stands still: a device that hangs raises nothing, and whoever supervises this process
can start it again only once it has ended. Frontends have left it by then, or do now: no request is lost.
"""

import sys
import threading
from collections.abc import Callable
from types import FrameType

from engine.errors import DeviceError

_LOOK_EVERY_S = 1.0


class Watchdog:
    """Looks at the step loop from a thread of its own.

    Time is counted in looks, not by the clock: a process that is stopped or a machine that sleeps is not a hang.

    Args:
        mark: changes with every turn of the loop, or with whatever it gets done.
        timeout_s: how long it may stay the same; 0: for ever.
        on_hang: called once, on the thread, with what to say; may end the process.
        thread_id: of the step loop, to say where it stands.
        reason: what that means, to say so.
        look_every_s: pause between two looks.
    """

    def __init__(
        self,
        mark: Callable[[], object],
        timeout_s: float,
        on_hang: Callable[[DeviceError], None],
        *,
        thread_id: int,
        reason: str = "the device hangs, or a step takes longer than --step-timeout allows",
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self._mark = mark
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._thread_id = thread_id
        self._reason = reason
        self._look_every_s = look_every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        seen, num_same = self._mark(), 0
        while not self._over.wait(self._look_every_s):
            mark = self._mark()
            num_same = num_same + 1 if mark == seen else 0
            seen = mark
            if num_same * self._look_every_s >= self._timeout_s:
                self._on_hang(DeviceError(self._complaint()))
                return

    def _complaint(self) -> str:
        place = _place(sys._current_frames().get(self._thread_id))
        return f"the step loop has stood still for {self._timeout_s:g} s{place}: {self._reason}"


def _place(frame: FrameType | None) -> str:
    """The innermost line of our own, and of all."""
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
