"""An upper bound of goodput: how many requests can be good if batches had no limits and reading weights cost nothing.

Every request costs at least the device time of its products and of its attention, and a prefix that any earlier request
had is always cached. Parts of that work have their time: a prompt must be computed between its arrival and the due time
of its first token, token k of the answer k gaps later, all of it before the end of the simulation. Where each gap is
judged by itself and a good answer may have a late one, that one may be of any length: no later token is due before the
end. In every window of time, the work that must be done inside it by the requests that are good is at most the window.
How many can be good under these constraints is a linear program; its dual prices time:

    bound = sum of price * length over windows + sum over requests of max(0, 1 - sum of price * work in the window)

This is an upper bound for any prices (weak duality). Good ones are found by a primal-dual method with diagonal steps
(Pock and Chambolle 2011, "Diagonal preconditioning for first order primal-dual algorithms").
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from chairlift.service.service_classes import MAX_LATE_SHARE
from engine.core.latency.step_time import StepTimePrior
from loadgen.simulation.step_cost import answer_seconds, prompt_seconds
from loadgen.simulation.workload import SimulatedRequest

_Floats = npt.NDArray[np.float64]
_NUM_PARTS = 32  # of the load: windows are all runs of parts, and shorter ones
_NUM_ROUNDS, _NUM_ITERATIONS = 15, 150
_MIN_PRICE = 1e-4  # of the highest; windows below it are dropped


def upper_bound(
    requests: Sequence[SimulatedRequest],
    cost: StepTimePrior,
    num_engines: int,
    grace_s: float,
    cached_tokens: Sequence[int] | None = None,
) -> float:
    """Returns how many of the requests can be good at most.

    Args:
        requests: in order of arrival, at least one.
        cost: of the steps of every engine.
        num_engines: of the fleet.
        grace_s: seconds after the last arrival until which answers may end.
        cached_tokens: of each prompt, the most that a cache can have; None: nothing is shared.
    """
    work = _Work(requests, cost, cached_tokens)
    load_s = requests[-1].arrival_s
    windows = [one for one in _windows(load_s, work.last_due_s, load_s + grace_s) if one[0] < one[1]]
    if not windows:
        return float(len(requests))
    work_s = np.stack([work.inside(start_s, end_s, is_last=is_last) for start_s, end_s, is_last in windows])
    lengths_s = np.array([(end_s - start_s) * num_engines for start_s, end_s, _ in windows])
    return _dual(work_s, lengths_s)


class _Work:
    """Device time that requests must have inside a window if they are good; arrays are in order of arrival."""

    def __init__(
        self, requests: Sequence[SimulatedRequest], cost: StepTimePrior, cached_tokens: Sequence[int] | None
    ) -> None:
        inputs = np.array([request.input_tokens for request in requests], dtype=np.float64)
        # The first token comes with the prompt.
        self._outputs = np.array([request.output_tokens - 1 for request in requests], dtype=np.float64)
        cached = np.zeros_like(inputs) if cached_tokens is None else np.minimum(cached_tokens, inputs - 1)
        ttft_s = [request.service_class.ttft_s for request in requests]
        self._arrival_s = np.array([request.arrival_s for request in requests])
        self._due_s = self._arrival_s + np.array([np.inf if one is None else one for one in ttft_s])
        num_late = MAX_LATE_SHARE * (self._outputs + 1)
        is_paced = np.array([request.service_class.pacing == "paced" for request in requests])
        self._num_late = np.where(is_paced | (num_late < 1), num_late, np.inf)
        self._gap_s = np.array([request.inter_token_s for request in requests])
        self._inputs, self._cost = inputs, cost
        self._prompt_s = prompt_seconds(cost, inputs, cached)
        timed = self._due_s[np.isfinite(self._due_s)]
        self.last_due_s = float(timed.max()) if timed.size else float(self._arrival_s[-1])

    def inside(self, start_s: float, end_s: float, *, is_last: bool) -> _Floats:
        """Seconds that each request must have between two times; in the last window there is no later."""
        must_start = (self._arrival_s >= start_s) & (is_last | (self._due_s <= end_s))
        num_tokens = self._outputs
        if not is_last:
            num_due = np.floor(np.where(must_start, end_s - self._due_s, 0.0) / self._gap_s)  # of the later tokens
            num_tokens = np.maximum(0.0, np.minimum(num_tokens, num_due) - self._num_late)
        answer_s = answer_seconds(self._cost, self._inputs, num_tokens)
        return np.where(must_start, self._prompt_s + answer_s, 0.0)


def _windows(load_s: float, last_due_s: float, end_s: float) -> Iterator[tuple[float, float, bool]]:
    """Yields windows of time: start, end, and whether the window is one of the last."""
    span_s = max(load_s, last_due_s)
    times_s = [span_s * index / _NUM_PARTS for index in range(_NUM_PARTS + 1)]
    for first, start_s in enumerate(times_s):
        for until_s in times_s[first + 1 :]:
            yield start_s, until_s, False
        yield min(start_s, load_s), end_s, True
    for num_parts in (2 * _NUM_PARTS, 4 * _NUM_PARTS):
        length_s = span_s / num_parts
        for half in range(2 * num_parts - 1):
            yield half * length_s / 2, half * length_s / 2 + length_s, False


def _dual(work_s: _Floats, lengths_s: _Floats) -> float:
    """Returns the least bound that the prices reach.

    Args:
        work_s: of each request in each window [windows, requests].
        lengths_s: of the windows, times the engines.
    """
    is_needed = work_s.sum(axis=1) > lengths_s
    if not is_needed.any():
        return float(work_s.shape[1])
    load = work_s[is_needed] / lengths_s[is_needed, None]  # shares of the windows
    bound = float(load.shape[1])
    balance = math.sqrt(load.shape[1])  # prices are high, shares of requests are at most 1
    prices, taken = np.zeros(len(load)), np.zeros(load.shape[1])
    for _ in range(_NUM_ROUNDS):
        price_step, request_step = balance / load.sum(axis=1), 1.0 / (balance * np.maximum(load.sum(axis=0), 1e-12))
        price_sum, taken_sum = np.zeros_like(prices), np.zeros_like(taken)
        for _ in range(_NUM_ITERATIONS):
            moved = np.clip(taken + request_step * (1.0 - prices @ load), 0.0, 1.0)
            prices = np.maximum(0.0, prices + price_step * (load @ (2.0 * moved - taken) - 1.0))
            taken = moved
            price_sum += prices
            taken_sum += taken
        prices, taken = price_sum / _NUM_ITERATIONS, taken_sum / _NUM_ITERATIONS  # restart from the means
        bound = min(bound, float(prices.sum() + np.maximum(1.0 - prices @ load, 0.0).sum()))
        has_price = prices > _MIN_PRICE * prices.max()
        if not has_price.any():
            break
        load, prices = load[has_price], prices[has_price]
    return bound
