"""The policies that are compared: those of production, and baselines made of them with a bound or a timeout.

A specification is NAME or NAME@BUDGET, the budget in tokens per step:

    fcfs, priority, static, slo as `--scheduling-policy` of the engine; the queue is not bounded
    fcfs-bounded, priority-bounded, shortest-bounded
                                the same, and at most 16 requests wait: further ones are refused (the 429 of a server)
    fcfs-timeout, priority-timeout, shortest-timeout
                                the same, and a request that has waited for its whole first-token target is dropped
    shortest                    shortest prompt first

`priority` ranks classes by their first-token targets, the shortest first, those without one last. `shortest` is the
production policy `priority` with the length of the prompt as its value: ten seconds of ageing are worth one token, so
the order is that of lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from chairlift.service.service_classes import ServiceClass
from engine.core.config import SchedulingPolicyName
from loadgen.errors import OptionError
from loadgen.simulation.workload import SimulatedRequest

BOUNDED_REQUESTS = 16
"""Requests that wait at most under `-bounded`; more of them only wait in vain (8 to 32 give the same goodput at 2x)."""

UNBOUNDED_REQUESTS = 10**9
DEFAULT_BUDGET = 512
"""Tokens per step of a policy with a static budget: the best one on the constants of an H200."""

GOVERNED_BUDGET = 8192
"""The same of `slo`, which limits its steps by their duration."""

BASELINES = (
    "fcfs", "fcfs@2048", "fcfs-bounded", "fcfs-timeout", "priority", "priority-bounded", "priority-timeout",
    "shortest", "shortest-timeout",
)  # fmt: skip

_SUFFIXES = ("-bounded", "-timeout")
_SHORTEST = "shortest"


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One policy.

    Attributes:
        text: as it was given.
        scheduling: policy of the scheduler.
        budget: `max_num_batched_tokens`.
        max_waiting: requests in the queue of an engine.
        has_queue_timeout: requests are dropped when they have waited for their first-token target.
        by_prompt: `Request.priority` is the prompt's length instead of the rank of the class.
        ranks: of the classes by name, 0 for the shortest first-token target.
    """

    text: str
    scheduling: SchedulingPolicyName
    budget: int
    max_waiting: int
    has_queue_timeout: bool
    by_prompt: bool
    ranks: dict[str, int]

    def priority(self, request: SimulatedRequest) -> int:
        """Returns `Request.priority`, which only the policy `priority` reads."""
        return request.input_tokens if self.by_prompt else self.ranks.get(request.service_class.name, 0)


def parse_policy(text: str, classes: Sequence[ServiceClass]) -> PolicySpec:
    """Returns the policy of a specification.

    Args:
        text: see the module's docstring.
        classes: of the requests, for the ranks of `priority`.

    Raises: OptionError: there is no such policy, or the budget is not a whole number of at least 1.
    """
    name, at, budget = text.partition("@")
    if at and not (budget.isascii() and budget.isdecimal() and int(budget) >= 1):
        raise OptionError(
            f"--policy {text}: has a budget of {budget!r} tokens; it must be a whole number of at least 1"
        )
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    base = name.removesuffix(suffix)
    production = get_args(SchedulingPolicyName)
    if base not in (*production, _SHORTEST):
        known = ", ".join((*production, _SHORTEST))
        raise OptionError(
            f"--policy {text}: is unknown; there are {known}, most with -bounded or -timeout, and @BUDGET"
        )
    by_first_token = sorted({math.inf if one.ttft_s is None else one.ttft_s for one in classes})
    return PolicySpec(
        text=text,
        scheduling="priority" if base == _SHORTEST else next(one for one in production if one == base),
        budget=int(budget) if at else GOVERNED_BUDGET if base == "slo" else DEFAULT_BUDGET,
        max_waiting=BOUNDED_REQUESTS if suffix == "-bounded" else UNBOUNDED_REQUESTS,
        has_queue_timeout=suffix == "-timeout",
        by_prompt=base == _SHORTEST,
        ranks={one.name: by_first_token.index(math.inf if one.ttft_s is None else one.ttft_s) for one in classes},
    )
