"""Requests that hold no blocks, in the order of the policy; those without token credit stand aside."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator

from engine.core.request import Request, RequestId
from engine.errors import IntegrityError

_Entry = tuple[float, int, Request]  # the first two are unique, so that requests are never compared


class WaitingQueue:
    """A sorted list with O(log n) search and a short memmove per change, and the requests that wait for credit.

    Invariants: every request is in exactly one of the two; `num_tokens` is the sum over both, and so are the numbers of
    requests by session, of which none is 0.
    """

    def __init__(self, order_key: Callable[[Request], float]) -> None:
        self._order_key = order_key
        self._ready: list[_Entry] = []
        self._without_credit: dict[RequestId, Request] = {}
        self._num_by_session: dict[int, int] = {}
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

    def has_room(self, session: int, max_requests: int) -> bool:
        """Whether a session may have one more request wait: while there is room, or while it has less than its share,
        which is an equal part of the room, rounded up, for each session that has requests here.
        """
        if len(self) < max_requests:
            return True
        num_own = self._num_by_session.get(session, 0)
        num_sessions = len(self._num_by_session) + (not num_own)
        return num_own < -(-max_requests // num_sessions)

    def push(self, request: Request) -> None:
        """Puts a request in its place."""
        self.num_tokens += request.num_tokens
        self._num_by_session[request.session] = self._num_by_session.get(request.session, 0) + 1
        if request.token_credit is not None and request.token_credit <= 0:
            self._without_credit[request.request_id] = request
        else:
            insort(self._ready, self._entry(request))

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands; it must not have changed since it was pushed."""
        self.num_tokens -= request.num_tokens
        num_left = self._num_by_session.pop(request.session) - 1
        if num_left:
            self._num_by_session[request.session] = num_left
        if self._without_credit.pop(request.request_id, None) is None:
            del self._ready[bisect_left(self._ready, self._entry(request))]

    def check_integrity(self) -> None:
        """Counts anew.

        Raises: IntegrityError: the books say something else.
        """
        if sum(request.num_tokens for request in self) != self.num_tokens:
            raise IntegrityError(f"the queue counts {self.num_tokens} tokens")
        if Counter(request.session for request in self) != self._num_by_session:
            raise IntegrityError(f"the queue counts {self._num_by_session} requests by session")

    def _entry(self, request: Request) -> _Entry:
        return (self._order_key(request), request.arrival_index, request)
