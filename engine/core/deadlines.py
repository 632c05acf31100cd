"""Which requests run out of time next."""

import heapq

from engine.core.request import RequestId


class Deadlines:
    """A heap of deadlines; those of finished requests stay until they come up or outnumber the living.

    Invariant: at most twice as many entries as living requests, plus a constant.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []
        self._alive: dict[RequestId, float] = {}

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap and self._alive.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, request_id: RequestId, deadline_s: float) -> None:
        """Watches a request."""
        self._alive[request_id] = deadline_s
        heapq.heappush(self._heap, (deadline_s, request_id))

    def discard(self, request_id: RequestId) -> None:
        """Stops watching a request; one that is not watched is fine."""
        if self._alive.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._alive) + 64:
            self._heap = [(deadline_s, request_id) for request_id, deadline_s in self._alive.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now_s: float) -> list[RequestId]:
        """The requests whose deadline has come, earliest first; they are watched no longer."""
        due = []
        while (next_s := self.next_s) is not None and next_s <= now_s:
            _, request_id = heapq.heappop(self._heap)
            del self._alive[request_id]
            due.append(request_id)
        return due
