"""Runs policies on one workload at several loads, with repeats, beside the bound that none of them can exceed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from chairlift.service.service_classes import ServiceClass
from loadgen.errors import OptionError
from loadgen.simulation.bound import upper_bound
from loadgen.simulation.fleet import FleetOptions, simulate
from loadgen.simulation.policies import PolicySpec
from loadgen.simulation.results import Replay, SimulationResult, summarize
from loadgen.simulation.workload import requests_of
from loadgen.trace.oracle import ideal_cached_tokens
from loadgen.trace.schema import Trace
from loadgen.trace.window import at_rate, at_speed, from_zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What arrives.

    Attributes:
        trace: arrivals from 0.
        classes: service classes by name; empty: none.
        mix: weight of each class; empty: all alike.
        duration_s: length of every replay: it has as many requests as the rate gives; None: all of the trace.
        num_repeats: replays, each with a seed of its own; of a trace longer than the duration each takes a later part.
        shift: requests between the beginnings of two repeats.
        warmup_s: arrivals before are not counted.
        grace_s: seconds after the last arrival until which answers may end.
        seed: of the first repeat.
    """

    trace: Trace
    classes: Mapping[str, ServiceClass]
    mix: Mapping[str, float]
    duration_s: float | None = None
    num_repeats: int = 1
    shift: int = 1500
    warmup_s: float = 0.0
    grace_s: float = 30.0
    seed: int = 0

    def part(self, load: float, repeat: int) -> Trace:
        """Returns the requests of one repeat at `load` times the trace's rate.

        Raises: OptionError: the trace is too short for the duration or the warm-up.
        """
        part = self._part(load, repeat)
        if self.warmup_s > 0 and part.arrival_s[-1] <= self.warmup_s:
            raise OptionError(
                f"--warmup {self.warmup_s:g}: at load {load:g} the last request arrives at {part.arrival_s[-1]:.4g} s; "
                "lower it, or none is counted"
            )
        return part

    def _part(self, load: float, repeat: int) -> Trace:
        trace = self.trace
        if self.duration_s is None:
            return at_speed(trace, load)
        if trace.span_s == 0:
            raise OptionError(f"--duration {self.duration_s:g}: all requests arrive at once; leave it out")
        rate = load * len(trace) / trace.span_s
        count, first = max(2, round(rate * self.duration_s)), repeat * self.shift
        if first + count > len(trace):
            raise OptionError(
                f"--duration {self.duration_s:g} at {rate:.4g} requests/s needs {count} requests after the first "
                f"{first}, the trace has {len(trace)}; lower the duration, the rate, --loads, --repeats or --shift"
            )
        return from_zero(at_rate(trace.take(np.arange(first, first + count), "not in this repeat"), rate))


class LoadResult(NamedTuple):
    """One load: the result of each policy in the order in which they were given.

    `bound` is the share of good requests that no policy can exceed, of those that are counted.
    """

    load: float
    bound: float
    results: tuple[SimulationResult, ...]


def study(
    workload: Workload,
    options: FleetOptions,
    policies: Sequence[PolicySpec],
    loads: Sequence[float],
    *,
    num_accelerators: int = 1,
) -> list[LoadResult]:
    """Simulates every policy at every load.

    Args:
        workload: what arrives.
        options: the fleet; its policy and seed are replaced.
        policies: at least one.
        loads: multiples of the trace's rate.
        num_accelerators: of one engine.

    Raises: OptionError: see `Workload.part`; before anything is simulated.
    """
    workload.part(max(loads), workload.num_repeats - 1)  # needs the most requests, and is over first
    studied = []
    for load in loads:
        results = tuple(
            simulate_policy(workload, replace(options, policy=policy), load, num_accelerators=num_accelerators)
            for policy in policies
        )
        studied.append(LoadResult(load, _bound(workload, options, load), results))
    return studied


def simulate_policy(
    workload: Workload, options: FleetOptions, load: float, *, num_accelerators: int = 1
) -> SimulationResult:
    """Simulates all repeats of one policy at one load."""
    replays = []
    for repeat in range(workload.num_repeats):
        trace, seed = workload.part(load, repeat), workload.seed + repeat
        requests = requests_of(trace, workload.classes, workload.mix, seed)
        until_s = requests[-1].arrival_s + workload.grace_s
        replays.append(Replay(requests, simulate(requests, replace(options, seed=seed), until_s)))
    return summarize(
        replays,
        options,
        class_names=workload.classes,
        warmup_s=workload.warmup_s,
        num_accelerators=num_accelerators,
    )


def _bound(workload: Workload, options: FleetOptions, load: float) -> float:
    num_good, num_requests = 0.0, 0
    for repeat in range(workload.num_repeats):
        trace = workload.part(load, repeat)
        requests = requests_of(trace, workload.classes, workload.mix, workload.seed + repeat)
        cached = ideal_cached_tokens(trace) if options.has_prefix_cache else np.zeros(len(trace), np.int64)
        first = int(np.searchsorted(trace.arrival_s, workload.warmup_s))  # those before it need not be served at all
        if counted := requests[first:]:
            num_good += upper_bound(
                counted, options.cost, options.num_engines, workload.grace_s, cached[first:].tolist()
            )
            num_requests += len(counted)
    return num_good / num_requests if num_requests else math.nan
