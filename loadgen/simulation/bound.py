"""An upper bound of goodput that no policy can exceed: the cheapest requests first, as if batches had no limits.

Every request costs at least the device time of its products and of its attention; reading the weights, waiting and
bad luck cost nothing here, and a prefix that any earlier request had is always cached. Of the requests with targets
the cheapest ones are taken until the time up to the last possible first token is used up, then those without, until
the end of the simulation. No order and no refusal can serve more requests in that time.
"""

from collections.abc import Sequence

from engine.core.latency.step_time import StepTimePrior
from loadgen.simulation.step_cost import request_seconds
from loadgen.simulation.workload import SimulatedRequest


def upper_bound(
    requests: Sequence[SimulatedRequest],
    cost: StepTimePrior,
    num_engines: int,
    grace_s: float,
    cached_tokens: Sequence[int] | None = None,
) -> int:
    """Returns how many of the requests can be good at most.

    Args:
        requests: in order of arrival, at least one.
        cost: of the steps of every engine.
        num_engines: of the fleet.
        grace_s: seconds after the last arrival until which a request without targets counts.
        cached_tokens: of each prompt, the most that a cache can have; None: nothing is shared.
    """
    load_s = requests[-1].arrival_s
    cached = [0] * len(requests) if cached_tokens is None else cached_tokens
    timed, other = [], []
    slack_s = 0.0
    for request, num_cached in zip(requests, cached, strict=True):
        seconds = request_seconds(
            cost, request.input_tokens, request.output_tokens, min(int(num_cached), request.input_tokens - 1)
        )
        if request.service_class.ttft_s is None:
            other.append(seconds)
        else:
            timed.append(seconds)
            slack_s = max(slack_s, request.service_class.ttft_s)
    used_s, num_good = 0.0, 0
    for costs, end_s in ((sorted(timed), load_s + slack_s), (sorted(other), load_s + grace_s)):
        for seconds in costs:
            if used_s + seconds > num_engines * end_s:
                break
            used_s += seconds
            num_good += 1
    return num_good
