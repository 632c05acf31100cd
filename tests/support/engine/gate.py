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
        self._num_passing = 0

    def __call__(self, plan: SchedulerOutput) -> None:
        if self._num_passing:
            self._num_passing -= 1
        elif not self._is_open.is_set():
            self._holds.set()
            assert self._is_open.wait(HANG_S)

    async def holds(self) -> None:
        """Waits until a step is blocked."""
        assert await asyncio.to_thread(self._holds.wait, HANG_S)

    def let_pass(self, num_steps: int) -> None:
        """Blocks none of the next steps, before the first one."""
        self._num_passing = num_steps

    def open(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        self._holds.clear()  # first: a step between the two calls is not blocked
        self._is_open.clear()
