"""Limits the tasks that resume in one iteration of the event loop."""

import asyncio
from collections import deque


class TurnLimiter:
    """Lets a few tasks continue per iteration of the event loop; others wait in FIFO order.

    One engine step may bring tokens for hundreds of answers, whose tasks all wake at once and take 0.1 ms each.

    Args:
        max_per_turn: tasks per iteration.
    """

    def __init__(self, max_per_turn: int) -> None:
        self._max_per_turn = max_per_turn
        self._num_passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait_turn(self) -> None:
        """Waits for the caller's turn."""
        loop = asyncio.get_running_loop()
        if not self._num_passed:
            loop.call_soon(self._open)
        if self._num_passed < self._max_per_turn and not self._waiting:
            self._num_passed += 1
            return
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _open(self) -> None:
        """Starts an iteration."""
        self._num_passed = 0
        while self._waiting and self._num_passed < self._max_per_turn:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else it was cancelled
                self._num_passed += 1
                waiting.set_result(None)
        if self._num_passed:
            asyncio.get_running_loop().call_soon(self._open)
