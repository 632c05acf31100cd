"""Graceful shutdown on SIGTERM and SIGINT: the first signal drains, a second one ends the process at once.

One signal may arrive several times: `make`, `timeout` and systemd pass on what the whole process group already got.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

_log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

REPEAT_S = 1.0
"""The first signal, received again within this time, counts as the same one."""


class RepeatFilter:
    """Tells a second signal from a repetition of the first.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def is_repeat(self, number: int) -> bool:
        """Whether this signal repeats the first one. The first call starts the time."""
        now_s = self._clock()
        if self._first is None:
            self._first = (number, now_s)
            return False
        first, first_s = self._first
        return number == first and now_s - first_s <= REPEAT_S


class StopSignals:
    """Handles both signals on an event loop.

    Args:
        count_open: returns the number of open requests, for the log; None: unknown to this process.
        clean_up: called before the process ends at once.
        clock: seconds.
        end: ends the process with a status.

    Attributes:
        stop: set by the first signal.
    """

    def __init__(
        self,
        *,
        count_open: Callable[[], int] | None = None,
        clean_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self.stop = asyncio.Event()
        self._count_open = count_open
        self._clean_up = clean_up
        self._filter = RepeatFilter(clock)
        self._end = end

    def watch(self) -> None:
        """Installs the handlers on the running event loop."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.handle, number)

    def handle(self, number: int) -> None:
        """Handles one signal."""
        if self._filter.is_repeat(number):
            return
        if not self.stop.is_set():
            self.stop.set()
            return
        num_cut = "" if self._count_open is None else f", {_requests(self._count_open())} cut off"
        _log.warning("second signal: ending at once%s", num_cut)
        self._clean_up()
        self._end(128 + number)


def _requests(number: int) -> str:
    return f"{number} request" if number == 1 else f"{number} requests"
