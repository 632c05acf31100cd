"""The queue of the `slo` policy: requests on time by their due times, best-effort requests by tenant and age."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from engine.core.latency.pacing import Lane, Pace
from engine.core.latency.tenant_shares import LeastServed, TenantShares
from engine.core.request import Request, RequestStatus
from engine.core.waiting_queue import Entry, WaitingQueue
from engine.errors import IntegrityError

_PATIENCE_S = 60.0  # after this wait the head of best effort gets blocks before requests on time


def pace(request: Request) -> Pace:
    """Returns the latency state of a request, which every request has under this policy."""
    assert request.pace is not None, f"request {request.request_id} has no latency state"
    return request.pace


def has_waited_long(request: Request, now_s: float) -> bool:
    """Whether a waiting best-effort request gets blocks before requests on time."""
    has_run = request.status is RequestStatus.PREEMPTED or request.output_ids  # the time in which it ran is no wait
    since_s = request.charged_until_s if has_run else request.arrival_s - request.waited_s
    return now_s - since_s > _PATIENCE_S


class LaneQueue(WaitingQueue):
    """Two lanes, with requests without token credit apart as in any queue.

    The lane on time is one sorted list, in which tenants have no say: another order would make requests late. The
    best-effort lane is one sorted list per tenant; its head is that of the tenant that has been served least.

    Invariants: those of `WaitingQueue`; every queued request is in the lane of its pace; `num_on_time_tokens` counts
    those of the lane on time; no empty list is kept.
    """

    def __init__(self, shares: TenantShares) -> None:
        super().__init__(lambda request: pace(request).key)
        self._shares = shares
        self._best_effort: dict[str, list[Entry]] = {}
        self._num_best_effort = 0
        self.num_on_time_tokens = 0
        self._tenants = LeastServed(shares.tokens)

    def __iter__(self) -> Iterator[Request]:
        yield from super().__iter__()
        for entries in self._best_effort.values():
            yield from (request for _, _, request in entries)

    def __len__(self) -> int:
        return super().__len__() + self._num_best_effort

    @property
    def head(self) -> Request | None:
        """The first request on time, otherwise the first best-effort one."""
        return self.first(Lane.ON_TIME) or self.first(Lane.BEST_EFFORT)

    @property
    def on_time(self) -> Sequence[Entry]:
        """The lane on time in order: key, number of the arrival, request."""
        return self._ready

    def first(self, lane: Lane) -> Request | None:
        """Returns the next request of a lane, or None."""
        if lane is Lane.ON_TIME:
            return self._ready[0][2] if self._ready else None
        tenant = self._tenants.first()
        return None if tenant is None else self._best_effort[tenant][0][2]

    def check_integrity(self) -> None:
        """Checks the lanes too.

        Raises: IntegrityError: a count is wrong, or a request is in the wrong lane.
        """
        super().check_integrity()
        best_effort = [request for entries in self._best_effort.values() for _, _, request in entries]
        for lane, requests in ((Lane.ON_TIME, [entry[2] for entry in self._ready]), (Lane.BEST_EFFORT, best_effort)):
            for request in requests:
                if pace(request).lane is not lane:
                    raise IntegrityError(f"request {request.request_id} is queued in lane {lane.name}")
        if len(best_effort) != self._num_best_effort:
            raise IntegrityError(f"the queue counts {self._num_best_effort} best-effort requests of {len(best_effort)}")
        if sum(request.num_tokens for _, _, request in self._ready) != self.num_on_time_tokens:
            raise IntegrityError(f"the queue counts {self.num_on_time_tokens} tokens on time")
        if not all(self._best_effort.values()):
            raise IntegrityError("the queue keeps an empty list of a tenant")

    def _insert(self, request: Request) -> None:
        self._shares.queue(request.tenant)
        state = pace(request)
        entry = (state.key, request.arrival_index, request)
        if state.lane is Lane.ON_TIME:
            insort(self._ready, entry)
            self.num_on_time_tokens += request.num_tokens
            return
        insort(self._best_effort.setdefault(request.tenant, []), entry)
        self._tenants.add(request.tenant)
        self._num_best_effort += 1

    def _delete(self, request: Request) -> None:
        self._shares.unqueue(request.tenant)
        state = pace(request)
        entry = (state.key, request.arrival_index, request)
        if state.lane is Lane.ON_TIME:
            del self._ready[bisect_left(self._ready, entry)]
            self.num_on_time_tokens -= request.num_tokens
            return
        entries = self._best_effort[request.tenant]
        del entries[bisect_left(entries, entry)]
        self._num_best_effort -= 1
        if not entries:
            del self._best_effort[request.tenant]
            self._tenants.remove(request.tenant)
