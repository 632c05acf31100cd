"""Who comes next and who yields first: the scheduler's policies.

A policy decides an order and a number of seats; budget, blocks and the mechanics of preemption are the scheduler's.
"""

from collections.abc import Iterable
from typing import Protocol

from chairlift.service.engine_protocol import EXPECTED_OUTPUT_TOKENS
from engine.core.config import SchedulerConfig
from engine.core.fair_queue import FairQueue
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request

_AHEAD_TOKENS = 2**50  # more than any start tag; their sum is still exact as a float


class SchedulingPolicy(Protocol):
    """What the scheduler asks of a policy, and tells it."""

    def arrive(self, request: Request) -> None:
        """A request has been accepted: gives it its place, by writing its `start_tag` and `num_charged_tokens`."""
        ...

    def order_key(self, request: Request) -> float:
        """Place in the queue: the lowest comes first, ties go by arrival. Constant for the life of a request, so that a
        preempted one finds its place again, ahead of everyone who has not been admitted yet.
        """
        ...

    def admit(self, request: Request) -> None:
        """A request leaves the queue and runs, for the first time or again."""
        ...

    def finish(self, request: Request) -> None:
        """A request has ended, wherever it was."""
        ...

    def preemption_class(self, request: Request) -> int:
        """Requests of a higher number yield first, and never does a lower number yield to a higher one."""
        ...

    def num_open_seats(self, num_running: int) -> int:
        """How many requests may be admitted in this step."""
        ...

    def end_admission(self, num_admitted: int, *, out_of_budget: bool) -> None:
        """Says how the admissions of this step went.

        Args:
            num_admitted: requests admitted since `num_open_seats` was asked.
            out_of_budget: they ended only because the step's tokens were used up.
        """
        ...


class FcfsPolicy:
    """First come, first served within each session; sessions share the engine by tokens, see `fair_queue.py`. One class
    for all.

    A request costs its prompt and its answer. The answer's length is a guess until it has ended; what the guess was
    wrong by is charged to the session's next requests.

    Requests that have moved here from an engine that was lost go first, among themselves in the same order: their
    answers are under way. Their sessions pay for them all the same.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._queue = FairQueue()

    def arrive(self, request: Request) -> None:
        """Behind what its session has waiting, and never before anyone who has been admitted."""
        num_tokens = request.num_tokens
        cost = num_tokens + max(0, min(request.max_num_tokens - num_tokens, EXPECTED_OUTPUT_TOKENS))
        request.num_charged_tokens = cost
        request.start_tag = self._queue.arrive(request.session, request.request_id, cost)

    def order_key(self, request: Request) -> float:
        """By start tag, after those that have moved."""
        return request.start_tag - _AHEAD_TOKENS if request.has_moved else request.start_tag

    def admit(self, request: Request) -> None:
        """Virtual time goes on."""
        self._queue.admit(request.start_tag)

    def finish(self, request: Request) -> None:
        """What it has cost is known now: nothing, if it never ran."""
        num_used_tokens = request.num_tokens if request.num_cached_tokens >= 0 else 0
        self._queue.finish(request.session, request.request_id, num_used_tokens - request.num_charged_tokens)

    def preemption_class(self, request: Request) -> int:  # noqa: ARG002 - all are equal
        """All equal."""
        return 0

    def num_open_seats(self, num_running: int) -> int:
        """Every seat is filled again as soon as it is empty."""
        return self._max_num_seqs - num_running

    def end_admission(self, num_admitted: int, *, out_of_budget: bool) -> None:
        """Keeps no state."""


class PriorityPolicy(FcfsPolicy):
    """Lowest `priority` first, with ageing: a request that has waited `ageing_s` seconds ranks one level better.

    The effective priority, `priority - waited_s / ageing_s`, falls for all requests at the same rate, so that their
    order never changes and `arrival_s + priority * ageing_s` orders them the same way without a clock. One that has
    moved here brings its age along. Sessions play no part: whoever sends priorities has said what comes first, and
    ageing bounds how long a flood can hold up the others.
    """

    def __init__(self, max_num_seqs: int, ageing_s: float) -> None:
        super().__init__(max_num_seqs)
        self._ageing_s = ageing_s

    def order_key(self, request: Request) -> float:
        """When an equal request of priority 0 would have had to arrive."""
        return request.arrival_s - request.waited_s + request.priority * self._ageing_s

    def preemption_class(self, request: Request) -> int:
        """The priority itself: ageing helps to get in, not to push others out."""
        return request.priority


class StaticPolicy(FcfsPolicy):
    """Fills a batch, runs it until its longest request is done, then loads the next: the baseline that batching at
    every step is compared with. The batch stays open while its prompts wait for budget; a seat whose request has
    finished stays empty.
    """

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self._num_open_seats = 0

    def num_open_seats(self, num_running: int) -> int:
        """All seats once the last batch is done, those not yet taken while one is being filled, else none."""
        if num_running == 0:
            self._num_open_seats = self._max_num_seqs
        return self._num_open_seats

    def end_admission(self, num_admitted: int, *, out_of_budget: bool) -> None:
        """Closes the batch unless only the budget kept others out."""
        self._num_open_seats = self._num_open_seats - num_admitted if out_of_budget else 0


def make_policy(config: SchedulerConfig) -> SchedulingPolicy:
    """The policy that the configuration names."""
    match config.policy:
        case "fcfs":
            return FcfsPolicy(config.max_num_seqs)
        case "priority":
            return PriorityPolicy(config.max_num_seqs, config.ageing_s)
        case "static":
            return StaticPolicy(config.max_num_seqs)


def choose_victim(candidates: Iterable[Request], policy: SchedulingPolicy, cache: KVCacheManager) -> Request:
    """Of the lowest class, the running request that loses the fewest computed tokens; of equals, the latest.

    Tokens in published blocks count as kept: the prefix cache will probably give them back.
    """
    return max(
        candidates,
        key=lambda request: (
            policy.preemption_class(request),
            cache.num_published_tokens(request) - request.num_computed_tokens,
            request.arrival_index,
        ),
    )
