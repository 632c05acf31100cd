"""Order of admission and of preemption under `slo`."""

from engine.core.latency.lane_queue import pace
from engine.core.latency.pacing import pace_of
from engine.core.latency.tenant_shares import TenantShares
from engine.core.policy import FcfsPolicy
from engine.core.request import Request


class LatencyPolicy(FcfsPolicy):
    """Order of admission and of preemption by lane; enters requests in the accounts of their tenants."""

    def __init__(self, max_num_seqs: int, shares: TenantShares) -> None:
        super().__init__(max_num_seqs)
        self._shares = shares

    def arrive(self, request: Request) -> None:
        """Sets its latency state."""
        request.pace = pace_of(request)
        self._shares.enter(request.tenant)

    def order_key(self, request: Request) -> float:
        """Place within its lane."""
        return pace(request).key

    def admit(self, request: Request) -> None:
        """Keeps no state."""

    def finish(self, request: Request) -> None:
        """Its tenant may be idle now."""
        self._shares.leave(request.tenant)

    def preemption_class(self, request: Request) -> int:
        """Best effort is preempted first."""
        return pace(request).lane
