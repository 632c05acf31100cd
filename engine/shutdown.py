"""Ends an engine from outside: SIGTERM and SIGINT, and a parent process that goes away."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from chairlift.service.signals import STOP_SIGNALS, RepeatFilter

_log = logging.getLogger(__name__)


class StoppedWhileLoading(BaseException):
    """Raised on the main thread by a signal that arrives before the engine serves.

    It is no Exception, so that no handler in between swallows it.
    """


class Controlled(Protocol):
    """What signals drain and stop: an engine, or a machine with some of its ranks."""

    def drain(self, grace_s: float) -> None:
        """Takes nothing new, and ends when all is done or the grace period is over."""
        ...

    def stop(self) -> None:
        """Ends at once."""
        ...


class ShutdownSignals:
    """Handles SIGTERM and SIGINT: the first drains, a second one stops after the step in flight; any ends a load.

    With `watch_stdin`, the end of standard input stops the engine at once: its parent process has ended.
    """

    def __init__(self, drain_grace_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Installs the handlers; call it on the main thread.

        Args:
            drain_grace_s: longest time of a drain.
            clock: seconds.
        """
        self._drain_grace_s = drain_grace_s
        self._filter = RepeatFilter(clock)
        self._must_end = False
        self._engine: Controlled | None = None
        self._must_stop = False
        for signal_number in STOP_SIGNALS:
            signal.signal(signal_number, self._handle)

    def control(self, engine: Controlled) -> None:
        """Directs signals to this engine, or node; call it once the load is over.

        Raises: StoppedWhileLoading: see `check`.
        """
        self.check()
        self._engine = engine

    @property
    def ends_load(self) -> bool:
        """Whether a load is to end, or has ended, because of a signal: what fails now fails because of that."""
        return self._must_stop and self._engine is None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """The load, which is the body. An error in it after a signal is the signal's.

        A library may wrap what a signal raises within it, and a rank that ends makes others fail.

        Raises: StoppedWhileLoading: a signal arrived.
        """
        try:
            yield
        except Exception:
            self.check()
            raise

    def check(self) -> None:
        """Raises a pending signal; call it from time to time while loading. Does nothing on other threads.

        Raises: StoppedWhileLoading: a signal arrived where it could not be raised, as in a callback of a C library.
        """
        if self._must_stop and threading.current_thread() is threading.main_thread():
            raise StoppedWhileLoading

    def stop(self) -> None:
        """Ends the load or the engine at once; may be called from any thread."""
        self._must_end = self._must_stop = True
        os.kill(os.getpid(), signal.SIGTERM)  # only a signal interrupts a main thread that is loading

    def drain(self) -> None:
        """Drains the engine, or ends its load, as a first signal does; may be called from any thread."""
        if self._engine is None:
            self.stop()
        elif not self._must_stop:
            self._must_stop = True
            self._engine.drain(self._drain_grace_s)

    def watch_stdin(self) -> None:
        """Stops the engine when standard input closes; its content is ignored."""
        threading.Thread(target=self._read_stdin, name="stdin-watch", daemon=True).start()

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if not self._must_end and self._filter.is_repeat(signal_number):
            return
        if self._engine is None:
            self._must_stop = True
            if not _is_within(frame, "llvmlite"):  # its callbacks print what is raised in them, and go on
                raise StoppedWhileLoading
            return
        if self._must_stop:
            if not self._must_end:
                _log.warning("second signal: ending at once")
            self._engine.stop()
        else:
            self._must_stop = True  # the next signal ends the drain
            self._engine.drain(self._drain_grace_s)

    def _read_stdin(self) -> None:
        # Not sys.stdin: a thread that holds its lock at exit is a fatal error of the interpreter.
        with contextlib.suppress(OSError):  # never open, or its terminal has gone: the same as its end
            while os.read(0, 4096):
                pass
        self.stop()


def _is_within(frame: FrameType | None, package: str) -> bool:
    """Whether a function of the package is on the stack."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            return True
        frame = frame.f_back
    return False
