"""Scheduling policies: the order of admission and of preemption.

A policy decides the order and how many requests may be admitted; the scheduler owns budget, blocks and preemption.
"""

from collections.abc import Iterable
from typing import Protocol

from chairlift.service.engine_protocol import EXPECTED_OUTPUT_TOKENS
from engine.core.config import SchedulerConfig
from engine.core.fair_queue import FairQueue
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request

AGEING_S = 10.0
"""Under `priority`, waiting this many seconds is worth one priority level."""

_AHEAD_TOKENS = 2**50  # more than any start tag; the difference is still exact as a float


class SchedulingPolicy(Protocol):
    """Interface between scheduler and policy."""

    def arrive(self, request: Request) -> None:
        """Called for every accepted request: sets its `start_tag` and `num_charged_tokens`."""
        ...

    def order_key(self, request: Request) -> float:
        """Place in the queue: the lowest key comes first, ties go by arrival.

        Constant for the life of a request, so that a preempted request returns to its place.
        """
        ...

    def admit(self, request: Request) -> None:
        """Called when a request leaves the queue and runs, for the first time or resumed."""
        ...

    def finish(self, request: Request) -> None:
        """Called when a request finishes, running or waiting."""
        ...

    def preemption_class(self, request: Request) -> int:
        """Requests of a higher class are preempted first; a request never preempts one of a lower class."""
        ...

    def max_admissions(self, num_running: int) -> int:
        """Returns how many requests may be admitted in this step."""
        ...

    def end_admission(self, num_admitted: int, *, out_of_budget: bool) -> None:
        """Called after the admissions of a step.

        Args:
            num_admitted: requests admitted since `max_admissions` was called.
            out_of_budget: whether admission stopped only because the token budget was used up.
        """
        ...


class FcfsPolicy:
    """First come, first served within each session; sessions share the engine by tokens (see `fair_queue.py`).

    All requests have the same preemption class. A request costs its prompt and output tokens. The output length is an
    estimate until the request finishes; the error is charged to the next requests of its session.

    Requests that moved here from a lost engine go first, in the same order among themselves, since clients already
    receive their output. Their sessions are charged for them as usual.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._queue = FairQueue()

    def arrive(self, request: Request) -> None:
        """Places it behind the waiting requests of its session, and never ahead of an admitted request."""
        num_tokens = request.num_tokens
        cost = num_tokens + max(0, min(request.max_num_tokens - num_tokens, EXPECTED_OUTPUT_TOKENS))
        request.num_charged_tokens = cost
        request.start_tag = self._queue.arrive(request.session, request.request_id, cost)

    def order_key(self, request: Request) -> float:
        """The start tag; requests that moved here come first."""
        return request.start_tag - _AHEAD_TOKENS if request.has_moved else request.start_tag

    def admit(self, request: Request) -> None:
        """Advances virtual time, unless the request went ahead of its place: new sessions would start behind it."""
        if not request.has_moved:
            self._queue.admit(request.start_tag)

    def finish(self, request: Request) -> None:
        """Charges the actual cost, which is now known: 0 if it never ran."""
        num_used_tokens = request.num_tokens if request.num_cached_tokens >= 0 else 0
        self._queue.finish(request.session, request.request_id, num_used_tokens - request.num_charged_tokens)

    def preemption_class(self, request: Request) -> int:  # noqa: ARG002 - all are equal
        """One class for all requests."""
        return 0

    def max_admissions(self, num_running: int) -> int:
        """Refills the running batch up to `max_num_seqs` at every step."""
        return self._max_num_seqs - num_running

    def end_admission(self, num_admitted: int, *, out_of_budget: bool) -> None:
        """Keeps no state."""


class PriorityPolicy(FcfsPolicy):
    """Lowest `priority` value first, with ageing: waiting `AGEING_S` seconds is worth one priority level.

    The effective priority, `priority - waited_s / AGEING_S`, falls for all requests at the same rate. Their order is
    therefore constant, and `arrival_s + priority * AGEING_S` gives it without a clock. A request that moved here keeps
    its age. Sessions are ignored: priorities already state the order, and ageing bounds the wait of the others.
    """

    def order_key(self, request: Request) -> float:
        """The arrival time of an equally ranked request of priority 0."""
        return request.arrival_s - request.waited_s + request.priority * AGEING_S

    def preemption_class(self, request: Request) -> int:
        """The priority itself: ageing affects admission, not preemption."""
        return request.priority


class StaticPolicy(FcfsPolicy):
    """Static batching: fills a batch, runs it until its longest request finishes, then fills the next.

    It is the baseline of continuous batching. The batch stays open while its prompts wait for token budget; the slot of
    a finished request stays empty.
    """

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self._num_open = 0

    def max_admissions(self, num_running: int) -> int:
        """`max_num_seqs` once the last batch has finished, the rest while a batch is being filled, otherwise 0."""
        if num_running == 0:
            self._num_open = self._max_num_seqs
        return self._num_open

    def end_admission(self, num_admitted: int, *, out_of_budget: bool) -> None:
        """Closes the batch unless only the token budget stopped admission."""
        self._num_open = self._num_open - num_admitted if out_of_budget else 0


def make_policy(config: SchedulerConfig) -> SchedulingPolicy:
    """Returns the policy that the configuration names."""
    match config.policy:
        case "fcfs":
            return FcfsPolicy(config.max_num_seqs)
        case "priority":
            return PriorityPolicy(config.max_num_seqs)
        case "static":
            return StaticPolicy(config.max_num_seqs)
        case "slo":
            raise AssertionError("the policy slo has a scheduler of its own, see make_scheduler")


def choose_victim(candidates: Iterable[Request], policy: SchedulingPolicy, cache: KVCacheManager) -> Request:
    """Returns the request to preempt: of the highest class number, the one that loses the fewest computed tokens.

    Ties go to the latest arrival. Tokens in published blocks count as kept: the prefix cache probably still has them
    when the request resumes.
    """
    return max(
        candidates,
        key=lambda request: (
            policy.preemption_class(request),
            cache.num_published_tokens(request) - request.num_computed_tokens,
            request.arrival_index,
        ),
    )
