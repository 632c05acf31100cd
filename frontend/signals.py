"""SIGTERM and SIGINT of a frontend's process: the first one drains, a later one ends at once.

One signal may come more than once: `make` passes on what its whole group gets, and so do `timeout` and systemd.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

logger = logging.getLogger(__name__)

REPEAT_S = 1.0
"""The first signal, come again within this time, is still the first one."""


class StopSignals:
    """What a process is told by signals.

    Args:
        count_open: requests that a sudden end cuts off; None: this process does not know.
        clean_up: called before a sudden end.
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
        self._clock = clock
        self._end = end
        self._first: tuple[int, float] | None = None

    def watch(self) -> None:
        """Takes over both signals, for the event loop that runs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle, number)

    def handle(self, number: int) -> None:
        """One of them has come."""
        now_s = self._clock()
        if self._first is None:
            self._first = (number, now_s)
            self.stop.set()
            return
        first, first_s = self._first
        if number == first and now_s - first_s <= REPEAT_S:
            return
        num_cut = "" if self._count_open is None else f", {_requests(self._count_open())} cut off"
        logger.warning("second signal: ending at once%s", num_cut)
        self._clean_up()
        self._end(128 + number)


def _requests(number: int) -> str:
    return f"{number} request" if number == 1 else f"{number} requests"
