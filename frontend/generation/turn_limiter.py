"""Spreads what one step of the engine wakes over several turns of the event loop."""

import asyncio
from collections import deque


class TurnLimiter:
    """Lets some through in each turn of the event loop; the others wait, first come, first served.

    One step may bring tokens for hundreds of answers, which all wake at once, and each takes a tenth of a millisecond.

    Args:
        most_per_turn: how many.
    """

    def __init__(self, most_per_turn: int) -> None:
        self._most_per_turn = most_per_turn
        self._num_passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait_turn(self) -> None:
        """Waits until it is this one's turn."""
        loop = asyncio.get_running_loop()
        if not self._num_passed:
            loop.call_soon(self._open)
        if self._num_passed < self._most_per_turn and not self._waiting:
            self._num_passed += 1
            return
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _open(self) -> None:
        """Begins a turn."""
        self._num_passed = 0
        while self._waiting and self._num_passed < self._most_per_turn:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else it was cancelled
                self._num_passed += 1
                waiting.set_result(None)
        if self._num_passed:
            asyncio.get_running_loop().call_soon(self._open)
