"""Queue of requests without blocks, in the order of the policy; requests without token credit are kept apart."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator

from engine.core.request import Request, RequestId
from engine.errors import IntegrityError

Entry = tuple[float, int, Request]  # the first two are unique, so that requests are never compared


class WaitingQueue:
    """A sorted list of ready requests (O(log n) search, a short memmove per change), and those without credit.

    Invariants: every request is in exactly one of the two; `num_tokens` and the requests by session count both.
    """

    def __init__(self, order_key: Callable[[Request], float]) -> None:
        self._order_key = order_key
        self._ready: list[Entry] = []
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
        """The next request to admit, or None."""
        return self._ready[0][2] if self._ready else None

    def has_capacity(self, session: int, max_requests: int) -> bool:
        """Returns whether a session may queue one more request.

        It may while the queue is not full, or while it has less than its share: `max_requests` divided by the sessions
        in the queue, rounded up.
        """
        if len(self) < max_requests:
            return True
        num_own = self._num_by_session.get(session, 0)
        num_sessions = len(self._num_by_session) + (not num_own)
        return num_own < -(-max_requests // num_sessions)

    def push(self, request: Request) -> None:
        """Inserts a request at its place."""
        self.num_tokens += request.num_tokens
        self._num_by_session[request.session] = self._num_by_session.get(request.session, 0) + 1
        if request.token_credit is not None and request.token_credit <= 0:
            self._without_credit[request.request_id] = request
        else:
            self._insert(request)

    def remove(self, request: Request) -> None:
        """Removes a request; its key and credit must be those of the push."""
        self.num_tokens -= request.num_tokens
        num_left = self._num_by_session.pop(request.session) - 1
        if num_left:
            self._num_by_session[request.session] = num_left
        if self._without_credit.pop(request.request_id, None) is None:
            self._delete(request)

    def check_integrity(self) -> None:
        """Recounts tokens and requests by session.

        Raises: IntegrityError: a count is wrong.
        """
        if sum(request.num_tokens for request in self) != self.num_tokens:
            raise IntegrityError(f"the queue counts {self.num_tokens} tokens")
        if Counter(request.session for request in self) != self._num_by_session:
            raise IntegrityError(f"the queue counts {self._num_by_session} requests by session")

    def _insert(self, request: Request) -> None:
        insort(self._ready, self._entry(request))

    def _delete(self, request: Request) -> None:
        del self._ready[bisect_left(self._ready, self._entry(request))]

    def _entry(self, request: Request) -> Entry:
        return (self._order_key(request), request.arrival_index, request)
