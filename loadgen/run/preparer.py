"""Prepares requests before they are due: all of them before the start or, of a very long workload, as many as a memory
budget allows, and the others while the worker is idle.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


class Preparer:
    """Prepares requests in the order in which they will be sent.

    Args:
        order: indices of the requests.
        make: returns the request of an index in the form that is sent.
        tokens: tokens of each request in `order`.
        budget: most tokens of prepared requests; one request is always allowed.
    """

    def __init__(self, order: Sequence[int], make: Callable[[int], Any], tokens: Sequence[int], budget: int) -> None:
        self._left = deque(zip(order, tokens, strict=True))
        self._make = make
        self._budget = budget
        self._ready: dict[int, tuple[Any, int]] = {}
        self._ready_tokens = 0

    @property
    def is_done(self) -> bool:
        """Whether every request has been prepared."""
        return not self._left

    @property
    def has_room(self) -> bool:
        """Whether the budget allows the next request, if there is one."""
        return bool(self._left) and (not self._ready or self._ready_tokens + self._left[0][1] <= self._budget)

    @property
    def next_tokens(self) -> int:
        """Tokens of the next request to be prepared."""
        return self._left[0][1]

    def fill(self) -> None:
        """Prepares requests until the budget is used up or none is left."""
        while self.has_room:
            self.prepare_one()

    def prepare_one(self) -> None:
        """Prepares the next request."""
        index, tokens = self._left.popleft()
        self._ready[index] = (self._make(index), tokens)
        self._ready_tokens += tokens

    def take(self, index: int) -> Any:
        """Returns a request that is sent now; prepares it if that has not been done."""
        while index not in self._ready:
            self.prepare_one()
        prepared, tokens = self._ready.pop(index)
        self._ready_tokens -= tokens
        return prepared

    def drop(self, index: int) -> None:
        """Skips the next request in the order, prepared or not: it will not be sent."""
        if index in self._ready:
            self.take(index)
        else:
            skipped, _ = self._left.popleft()
            assert skipped == index, (skipped, index)
