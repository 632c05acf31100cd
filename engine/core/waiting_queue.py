"""Requests that hold no blocks, in the order of the policy; those without token credit stand aside."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from engine.core.request import Request, RequestId

_Entry = tuple[float, int, Request]  # the first two are unique, so that requests are never compared


class WaitingQueue:
    """A sorted list with O(log n) search and a short memmove per change, and the requests that wait for credit.

    Invariants: every request is in exactly one of the two; `num_tokens` is the sum over both.
    """

    def __init__(self, order_key: Callable[[Request], float]) -> None:
        self._order_key = order_key
        self._ready: list[_Entry] = []
        self._without_credit: dict[RequestId, Request] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._without_credit)

    def __iter__(self) -> Iterator[Request]:
        yield from (request for _, _, request in self._ready)
        yield from self._without_credit.values()

    @property
    def head(self) -> Request | None:
        """Who is admitted next, if anyone can run."""
        return self._ready[0][2] if self._ready else None

    def push(self, request: Request) -> None:
        """Puts a request in its place."""
        self.num_tokens += request.num_tokens
        if request.token_credit is not None and request.token_credit <= 0:
            self._without_credit[request.request_id] = request
        else:
            insort(self._ready, self._entry(request))

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands; it must not have changed since it was pushed."""
        self.num_tokens -= request.num_tokens
        if self._without_credit.pop(request.request_id, None) is None:
            del self._ready[bisect_left(self._ready, self._entry(request))]

    def _entry(self, request: Request) -> _Entry:
        return (self._order_key(request), request.arrival_index, request)
