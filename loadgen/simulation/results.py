"""What a simulation says: latency, goodput by class, cache hits and cost, from its requests.

A request is good if its answer is complete and met the targets of its class: the first token within `ttft_s`, and at
most 1 % of its tokens late. Under `gap` a token is late after a gap above `inter_token_s`; under `paced` it is late
after `first + k * inter_token_s`. One percent forgives nothing below 100 tokens.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chairlift.service.service_classes import MAX_LATE_SHARE
from loadgen.measure.quantiles import Distribution, distribution
from loadgen.simulation.fleet import FleetOptions, FleetRun
from loadgen.simulation.workload import Outcome, SimulatedRequest

_PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """One service class, or all requests.

    Attributes:
        name: of the class; "all".
        num_requests: that arrived in the measured span; the next four count them by what became of them.
        num_good: met all targets.
        num_completed, num_refused, num_unfinished: by outcome; they add up to `num_requests`.
        ttft_s: seconds from arrival to the first token, of requests that got one.
        inter_token_s: seconds between tokens, of all tokens since the start.
        tpot_s: mean seconds per token after the first, of each request.
    """

    name: str
    num_requests: int
    num_good: int
    num_completed: int
    num_refused: int
    num_unfinished: int
    ttft_s: Distribution
    inter_token_s: Distribution
    tpot_s: Distribution

    @property
    def good_share(self) -> float:
        """Good requests of those that arrived; NaN without any."""
        return self.num_good / self.num_requests if self.num_requests else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One policy on one workload.

    Attributes:
        policy: as it was given.
        num_engines: of the fleet.
        span_s: seconds of arrivals that were measured, of all repeats.
        offered_per_s: requests that arrived in them.
        total: all classes together.
        classes: by class, in the order of the file.
        good_requests_per_s, good_tokens_per_s: tokens are those of prompt and answer of good requests.
        longest_quarter_share: good ones of the quarter with the longest prompts, among requests with targets.
        output_tokens_per_s: of all answers.
        cache_hit_share: prompt tokens found in prefix caches, of those of requests that started.
        vain_work_share: prompt tokens computed for targets that were then missed, of all computed.
        num_steps, num_preemptions: of all engines.
        busy_share: of the engines' time in which a step ran.
        engine_s: seconds of all engines, until the last event.
        accelerator_s: the same times the accelerators of an engine.
        accelerator_s_per_good_mtoken: the cost of a million good tokens while load arrives.
    """

    policy: str
    num_engines: int
    span_s: float
    offered_per_s: float
    total: ClassResult
    classes: tuple[ClassResult, ...]
    good_requests_per_s: float
    good_tokens_per_s: float
    longest_quarter_share: float
    output_tokens_per_s: float
    cache_hit_share: float
    vain_work_share: float
    num_steps: int
    num_preemptions: int
    busy_share: float
    engine_s: float
    accelerator_s: float
    accelerator_s_per_good_mtoken: float


def is_good(request: SimulatedRequest) -> bool:
    """Returns whether a request that has ended met its targets; see the module's docstring."""
    return request.outcome is Outcome.COMPLETED and _is_in_time(request)


def _is_in_time(request: SimulatedRequest) -> bool:
    """Whether the tokens that a request got met its targets; it got at least the first."""
    service_class = request.service_class
    if service_class.ttft_s is not None and not request.first_s - request.arrival_s <= service_class.ttft_s + 1e-9:
        return False
    num_late = request.num_late_tokens if service_class.pacing == "paced" else request.num_wide_gaps
    return num_late <= MAX_LATE_SHARE * request.num_tokens


def _is_in_vain(request: SimulatedRequest) -> bool:
    """Whether it missed targets. An answer in time that the end of the simulation cut off has missed nothing."""
    is_cut = request.outcome is Outcome.UNFINISHED
    return request.service_class.has_targets and not (_is_in_time(request) if is_cut else is_good(request))


class Replay(NamedTuple):
    """One simulation: its requests, all ended, in order of arrival, and what else was recorded."""

    requests: Sequence[SimulatedRequest]
    run: FleetRun


def summarize(
    replays: Sequence[Replay],
    options: FleetOptions,
    *,
    class_names: Iterable[str] = (),
    warmup_s: float = 0.0,
    num_accelerators: int = 1,
) -> SimulationResult:
    """Returns the result of one simulation or of several repeats, whose requests are counted together.

    Args:
        replays: at least one, each with a request.
        options: of all of them.
        class_names: in the order of the result; others follow as they appear.
        warmup_s: requests that arrive before are served, but not counted.
        num_accelerators: of one engine.
    """
    requests = [request for replay in replays for request in replay.requests]
    runs = [replay.run for replay in replays]
    measured = [request for request in requests if request.arrival_s >= warmup_s]
    span_s = sum(replay.requests[-1].arrival_s - warmup_s for replay in replays)
    good = [request for request in measured if is_good(request)]
    timed = [request for request in measured if request.service_class.has_targets] or measured
    longest = sorted(timed, key=lambda request: request.input_tokens)[3 * len(timed) // 4 :]
    started = [request for request in measured if request.num_tokens]
    good_tokens_per_s = _ratio(sum(request.input_tokens + request.num_tokens for request in good), span_s)
    in_vain = [request for request in requests if _is_in_vain(request)]
    elapsed_s = sum(run.ended_s for run in runs)
    engine_s = options.num_engines * elapsed_s
    gaps_s = {name: array("d") for name in (*class_names, *(request.service_class.name for request in requests))}
    for run in runs:
        for name, gaps in run.gaps_s.items():
            gaps_s[name].extend(gaps)
    by_class = [
        _class_result(name, [request for request in measured if request.service_class.name == name], gaps)
        for name, gaps in gaps_s.items()
    ]
    return SimulationResult(
        policy=options.policy.text,
        num_engines=options.num_engines,
        span_s=span_s,
        offered_per_s=_ratio(len(measured), span_s),
        total=_class_result("all", measured, sum(gaps_s.values(), array("d"))),
        classes=tuple(by_class),
        good_requests_per_s=_ratio(len(good), span_s),
        good_tokens_per_s=good_tokens_per_s,
        longest_quarter_share=_ratio(sum(map(is_good, longest)), len(longest)),
        output_tokens_per_s=_ratio(sum(request.num_tokens for request in requests), elapsed_s),
        cache_hit_share=_ratio(sum(r.num_cached_tokens for r in started), sum(r.input_tokens for r in started)),
        vain_work_share=_ratio(
            sum(request.num_computed_tokens for request in in_vain),
            sum(request.num_computed_tokens for request in requests),
        ),
        num_steps=sum(run.num_steps for run in runs),
        num_preemptions=sum(run.num_preemptions for run in runs),
        busy_share=_ratio(sum(run.busy_s for run in runs), engine_s),
        engine_s=engine_s,
        accelerator_s=engine_s * num_accelerators,
        accelerator_s_per_good_mtoken=_ratio(options.num_engines * num_accelerators * 1e6, good_tokens_per_s),
    )


def _class_result(name: str, requests: Sequence[SimulatedRequest], gaps_s: "array[float]") -> ClassResult:
    ttft = [request.first_s - request.arrival_s for request in requests if request.num_tokens]
    tpot = [(r.last_s - r.first_s) / (r.num_tokens - 1) for r in requests if r.num_tokens > 1]
    outcomes = [request.outcome for request in requests]
    return ClassResult(
        name=name,
        num_requests=len(requests),
        num_good=sum(map(is_good, requests)),
        num_completed=outcomes.count(Outcome.COMPLETED),
        num_refused=outcomes.count(Outcome.REFUSED),
        num_unfinished=outcomes.count(Outcome.UNFINISHED),
        ttft_s=distribution(np.array(ttft, dtype=np.float64), _PERCENTILES),
        inter_token_s=distribution(np.frombuffer(gaps_s, dtype=np.float64), _PERCENTILES),
        tpot_s=distribution(np.array(tpot, dtype=np.float64), _PERCENTILES),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
