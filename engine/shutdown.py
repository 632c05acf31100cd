"""Ways for an engine to end from outside: signals, and a parent process that goes away."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from engine.serving.engine import Engine

_log = logging.getLogger(__name__)

REPEAT_S = 1.0
"""The first signal, come again within this time, is still the first one: a group and its parent may both pass it on."""


class StoppedWhileLoading(BaseException):
    """Raised on the main thread by a signal that comes before the engine serves.

    Not an Exception, so that no handler on the way swallows it.
    """


class ShutdownSignals:
    """SIGTERM and SIGINT: the first drains, a later one stops after the step in flight; any ends a load.

    With `watch_stdin`, the end of standard input stops at once: whoever started this process is gone, however it died.
    """

    def __init__(self, drain_grace_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes over both signals; on the main thread.

        Args:
            drain_grace_s: how long a drain may take.
            clock: seconds.
        """
        self._drain_grace_s = drain_grace_s
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._must_end = False
        self._engine: Engine | None = None
        self._must_stop = False
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, self._handle)

    def control(self, engine: Engine) -> None:
        """The load is over: signals are for this engine now.

        Raises: StoppedWhileLoading: see `check`.
        """
        self._engine = engine
        self.check()

    def check(self) -> None:
        """To be called now and then by whoever loads; does nothing on other threads than the main one.

        Raises: StoppedWhileLoading: a signal came where it could not be raised, as in a callback of a C library.
        """
        if self._must_stop and threading.current_thread() is threading.main_thread():
            raise StoppedWhileLoading

    def stop(self) -> None:
        """Ends the load or the engine at once; from any thread."""
        self._must_end = self._must_stop = True
        os.kill(os.getpid(), signal.SIGTERM)  # only a signal interrupts a main thread that is loading

    def watch_stdin(self) -> None:
        """Begins to watch standard input; what comes there is ignored."""
        threading.Thread(target=self._read_stdin, name="stdin-watch", daemon=True).start()

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self._is_repeat(signal_number):
            return
        if self._engine is None:
            self._must_stop = True
            if not _is_within(frame, "llvmlite"):  # compiles: its callbacks print what is raised in them, and go on
                raise StoppedWhileLoading
            return
        if self._must_stop:
            if not self._must_end:
                _log.warning("second signal: ending at once")
            self._engine.stop()
        else:
            self._must_stop = True  # the next one does not wait
            self._engine.drain(self._drain_grace_s)

    def _is_repeat(self, signal_number: int) -> bool:
        if self._must_end:
            return False
        if self._first is None:
            self._first = (signal_number, self._clock())
            return False
        first, first_s = self._first
        return signal_number == first and self._clock() - first_s <= REPEAT_S

    def _read_stdin(self) -> None:
        # Not sys.stdin: a thread that holds its lock at exit is a fatal error of the interpreter.
        with contextlib.suppress(OSError):  # it was never open, or its terminal has gone: the same as its end
            while os.read(0, 4096):
                pass
        self.stop()


def _is_within(frame: FrameType | None, package: str) -> bool:
    """Whether a function of the package is being called."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            return True
        frame = frame.f_back
    return False
