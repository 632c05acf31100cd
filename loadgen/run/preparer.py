"""Requests made ready before they are due: all of them before the start, or, of a very long workload, as many as memory
is meant to hold, and the rest while nothing else is to be done.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


class Preparer:
    """Makes requests in the order in which they will be taken.

    Args:
        order: indices of the requests.
        make: the request of an index, in the form that is sent.
        tokens: of each request of `order`: what it weighs.
        budget: most tokens that lie ready at a time; one request at least always may.
    """

    def __init__(self, order: Sequence[int], make: Callable[[int], Any], tokens: Sequence[int], budget: int) -> None:
        self._left = deque(zip(order, tokens, strict=True))
        self._make = make
        self._budget = budget
        self._ready: dict[int, tuple[Any, int]] = {}
        self._ready_tokens = 0

    @property
    def is_done(self) -> bool:
        """Whether every request has been made."""
        return not self._left

    @property
    def has_room(self) -> bool:
        """Whether one is left to be made, and may be made now."""
        return bool(self._left) and (not self._ready or self._ready_tokens + self._left[0][1] <= self._budget)

    @property
    def next_tokens(self) -> int:
        """What the next one to be made weighs."""
        return self._left[0][1]

    def fill(self) -> None:
        """Makes requests until there is no room or none is left."""
        while self.has_room:
            self.prepare_one()

    def prepare_one(self) -> None:
        """Makes the next one."""
        index, tokens = self._left.popleft()
        self._ready[index] = (self._make(index), tokens)
        self._ready_tokens += tokens

    def take(self, index: int) -> Any:
        """A request, to be sent now; made now if it does not lie ready."""
        while index not in self._ready:
            self.prepare_one()
        prepared, tokens = self._ready.pop(index)
        self._ready_tokens -= tokens
        return prepared

    def drop(self, index: int) -> None:
        """A request that will not be sent: the next one in the order, made or not."""
        if index in self._ready:
            self.take(index)
        else:
            skipped, _ = self._left.popleft()
            assert skipped == index, (skipped, index)
