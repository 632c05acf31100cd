"""Deadlines and time budgets: which request runs out of time next, and with which reason it ends."""

import heapq

from chairlift.service.end_reason import EndReason
from engine.core.request import Request, RequestId


def end_of_time(request: Request) -> tuple[float, EndReason] | None:
    """Returns when a request runs out of time (monotonic seconds) and the reason; None if it has no limit.

    A deadline ends a request with an error, a time budget without one. The earlier of the two counts; on a tie, the
    budget.
    """
    deadline_s, budget_end_s = request.deadline_s, request.budget_end_s
    if budget_end_s is not None and (deadline_s is None or budget_end_s <= deadline_s):
        return budget_end_s, EndReason.TIME_BUDGET
    return None if deadline_s is None else (deadline_s, EndReason.DEADLINE)


class Deadlines:
    """A heap of end times. Entries of finished requests are removed when they are due or outnumber the live ones.

    Invariant: at most twice as many entries as live requests, plus a constant.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []
        self._alive: dict[RequestId, tuple[float, EndReason]] = {}

    @property
    def next_s(self) -> float | None:
        """The earliest end time, or None."""
        while self._heap and not self._is_alive(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, request: Request) -> None:
        """Adds a request if it has a deadline or a time budget."""
        end = end_of_time(request)
        if end is not None:
            self._alive[request.request_id] = end
            heapq.heappush(self._heap, (end[0], request.request_id))

    def discard(self, request_id: RequestId) -> None:
        """Removes a request; ignores one that was not added."""
        if self._alive.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._alive) + 64:
            self._heap = [(end_s, request_id) for request_id, (end_s, _) in self._alive.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now_s: float) -> list[tuple[RequestId, EndReason]]:
        """Removes and returns the requests whose time is up, with the reason, earliest first."""
        due = []
        while (next_s := self.next_s) is not None and next_s <= now_s:
            _, request_id = heapq.heappop(self._heap)
            due.append((request_id, self._alive.pop(request_id)[1]))
        return due

    def _is_alive(self, end_s: float, request_id: RequestId) -> bool:
        return request_id in self._alive and self._alive[request_id][0] == end_s
