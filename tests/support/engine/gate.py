"""Blocks the step loop of an engine in a step."""

import asyncio
import threading

from engine.core.outputs import SchedulerOutput
from tests.hang import HANG_S


class Gate:
    """Blocks the step loop in a step until it is opened."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._holds = threading.Event()

    def __call__(self, plan: SchedulerOutput) -> None:
        if not self._is_open.is_set():
            self._holds.set()
            assert self._is_open.wait(HANG_S)

    async def holds(self) -> None:
        """Waits until a step is blocked."""
        assert await asyncio.to_thread(self._holds.wait, HANG_S)

    def open(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        self._holds.clear()  # first: a step between the two calls is not blocked
        self._is_open.clear()
