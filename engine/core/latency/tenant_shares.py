"""Shares the engine fairly among tenants by the service they have received.

Method: virtual token counter (Sheng et al. 2024, arXiv:2401.00588). A tenant is charged when service is given, not when
a request arrives: a token for each prompt token that is computed, two for each output token, and the KV cache it holds
over time, all divided by its weight. The tenant with the lowest counter is served next.

A tenant that becomes active is lifted to the lowest counter of those that wait, so that none saves up service while
idle. An active one that begins to wait is lifted to `MAX_AHEAD_TOKENS` below it, so that an answer that runs for long
saves up no more than that. Counters never decrease.

**Bound.** Let U be the most that can still be charged, by weight, to the requests of one tenant that run at a time:
their prompts in chunks, their outputs and their KV cache until they end. If the next request is always taken from the
tenant with the lowest counter among those that wait, then the counters of two tenants that wait all the time differ by
at most U, or by `MAX_AHEAD_TOKENS` if that is more and one of them has just begun to wait: the higher one was the
lowest when its last request was admitted, and all charges since then belong to requests that ran already. Over an
interval in which both always wait, their services therefore differ by at most twice that.
The paper charges a prompt as a whole on admission; in chunks, admitted prompts are part of U instead. With S slots and
answers that fill a context of L tokens, U <= 2 * S * L plus the charge for KV cache, over the weight.
"""

import heapq
from collections.abc import Callable, Mapping

OUTPUT_TOKEN_CHARGE = 2.0
"""Virtual tokens of an output token: the ratio that the paper uses. An output token costs more than a prompt token,
because decoding reads all weights for one token of a request.
"""

OVER_SHARE_TOKENS = 8192.0
"""A tenant is over its share if its counter exceeds the lowest of those that wait by more than this."""

MAX_AHEAD_TOKENS = 2.0 * OVER_SHARE_TOKENS
"""The most service that an active tenant may have saved up when it begins to wait. It must exceed `OVER_SHARE_TOKENS`:
otherwise a tenant that floods would be no further above one that sends little.
"""

MAX_TENANTS = 4096
"""Counters kept. Beyond it, idle tenants are forgotten, the least recently active first."""


class LeastServed:
    """A set of tenants with the one of the lowest counter first.

    A heap with lazy corrections: counters of members only grow, so an entry that is too low is corrected when it comes
    to the top. Entries of tenants that left are dropped there, or when they outnumber the members.

    Invariants: every member has an entry, at most its counter; at most twice as many entries as members, plus a
    constant.
    """

    def __init__(self, tokens: Callable[[str], float]) -> None:
        self._tokens = tokens
        self._heap: list[tuple[float, str]] = []
        self._entered: dict[str, float] = {}  # members, with the counter in their entry

    def add(self, tenant: str) -> None:
        """Adds a tenant, if it is not there."""
        if tenant not in self._entered:
            self._entered[tenant] = self._tokens(tenant)
            heapq.heappush(self._heap, (self._entered[tenant], tenant))

    def remove(self, tenant: str) -> None:
        """Removes a tenant, whose counter may be lower when it is added again."""
        del self._entered[tenant]
        if len(self._heap) > 2 * len(self._entered) + 64:
            self._heap = [(entered, member) for member, entered in self._entered.items()]
            heapq.heapify(self._heap)

    def first(self) -> str | None:
        """Returns the tenant with the lowest counter; None: there is none."""
        heap = self._heap
        while heap:
            entered, tenant = heap[0]
            if self._entered.get(tenant) != entered:
                heapq.heappop(heap)
            elif (tokens := self._tokens(tenant)) > entered:
                self._entered[tenant] = tokens
                heapq.heapreplace(heap, (tokens, tenant))
            else:
                return tenant
        return None


class TenantShares:
    """Counters of virtual tokens.

    Use: `enter` and `leave` for every request, `queue` and `unqueue` whenever it begins and ends to wait for admission;
    `charge` for the service it gets.

    Invariants: counters never decrease while they are kept; at most `max_tenants` idle ones are.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, *, max_tenants: int = MAX_TENANTS) -> None:
        self._weights = dict(weights or {})
        self._max_tenants = max_tenants
        self._tokens: dict[str, float] = {}  # idle ones in the order in which they became idle, see `leave`
        self._num_live: dict[str, int] = {}  # requests of the active tenants
        self._num_queued: dict[str, int] = {}  # of these, those that wait
        self._waiting = LeastServed(self.tokens)  # tenants with queued requests
        self._last_queued = ""  # the last tenant that waited

    @property
    def is_shared(self) -> bool:
        """Whether several tenants are active. If not, there is nothing to charge: a tenant that enters is lifted."""
        return len(self._num_live) > 1

    def tokens(self, tenant: str) -> float:
        """Returns the counter of a tenant."""
        return self._tokens.get(tenant, 0.0)

    def is_over_share(self, tenant: str) -> bool:
        """Whether a tenant has received far more than the one that waits and received least."""
        return self.is_shared and self._tokens[tenant] > self._least() + OVER_SHARE_TOKENS

    def enter(self, tenant: str) -> None:
        """Counts a request that arrived; a tenant that was idle, or of which none waits, is lifted."""
        if tenant not in self._num_queued:
            max_ahead = MAX_AHEAD_TOKENS if tenant in self._num_live else 0.0
            self._tokens[tenant] = max(self.tokens(tenant), self._least() - max_ahead)
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1

    def queue(self, tenant: str) -> None:
        """Counts a request that begins to wait."""
        self._num_queued[tenant] = self._num_queued.get(tenant, 0) + 1
        self._waiting.add(tenant)

    def unqueue(self, tenant: str) -> None:
        """Counts a request that waits no more: it is admitted, or ends."""
        self._num_queued[tenant] -= 1
        if not self._num_queued[tenant]:
            del self._num_queued[tenant]
            self._waiting.remove(tenant)
            self._last_queued = tenant

    def leave(self, tenant: str) -> None:
        """Counts the end of a request."""
        self._num_live[tenant] -= 1
        if self._num_live[tenant]:
            return
        del self._num_live[tenant]
        self._tokens[tenant] = self._tokens.pop(tenant)  # now the last of the idle ones
        if len(self._tokens) > self._max_tenants:
            self._forget()

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Charges an active tenant for service."""
        self._tokens[tenant] += num_tokens / self._weights.get(tenant, 1.0)

    def _least(self) -> float:
        """The lowest counter of the tenants that wait; if there is none, that of the last one that did."""
        tenant = self._waiting.first()
        return self.tokens(self._last_queued if tenant is None else tenant)

    def _forget(self) -> None:
        idle = [tenant for tenant in self._tokens if tenant not in self._num_live]
        for tenant in idle[: max(0, len(self._tokens) - self._max_tenants)]:
            del self._tokens[tenant]
