"""The twin of an engine against the real pair: latency and goodput by class at 1, 2 and 3 times its capacity.

Claim: `chairlift simulate`, calibrated with the step log of an engine, predicts what the pair of that machine serves.

Goal: percentiles of TTFT and ITL within 15 %.

Method: one pair serves a small model with random weights under the policy `slo`. Closed loops with 1, 4 and all slots
in use give the step log to which the twin's step times are fitted, and the last one the capacity, in requests per
second. Then open loops at multiples of the capacity send requests of three service classes, 40 % interactive, 40 %
standard, 20 % batch, unless a file says otherwise; the twin gets the same arrivals, lengths and classes. Refused
requests do not come back. The twin's steps vary around the fit as those of the calibration did. The error is that of
the twin's figure, relative to the real one. Times of the pair count from when a request was due and contain the
frontend, the connection and the client, which share the machine's cores with the engine. In the twin they add the
median of what they added to the first tokens of the loop with 4 slots. It neither has the frontend's check before
tokenization nor its calendar of retries, whose horizon is at its minimum here.
"""

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.service.service_classes import ServiceClass
from loadgen.arrivals import at_once, gamma
from loadgen.checks.selfcheck import judge
from loadgen.cli.latency_target_flags import classes_of
from loadgen.experiments.latency.comparison import LoadComparison, compared, comparison_table, largest_error
from loadgen.experiments.latency.served import BLOCK_TOKENS, EngineLimits, ServedPair, percentile, served
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.measure.samples import samples_of
from loadgen.record import RunData
from loadgen.report.simulation_text import fit_lines
from loadgen.run.controller import RunOptions, run_workload
from loadgen.service_mix import ServiceMix
from loadgen.simulation.calibration import MIN_STEPS, Fit, fit_errors, fit_steps, time_ratio
from loadgen.simulation.fleet import FleetOptions, simulate
from loadgen.simulation.policies import parse_policy
from loadgen.simulation.results import Replay, SimulationResult, summarize
from loadgen.simulation.step_log import TimedStep
from loadgen.simulation.workload import requests_of
from loadgen.synthetic import lognormal, random_requests, with_arrivals
from loadgen.target.base import TargetSpec
from loadgen.trace.reader import read_trace
from loadgen.trace.schema import Trace
from loadgen.trace.window import at_rate, fit, from_zero, scale_lengths

CLASSES = """
[classes.interactive]
ttft_ms = 500
inter_token_ms = 50
pacing = "paced"
when_infeasible = "refuse"

[classes.standard]
ttft_ms = 2000
inter_token_ms = 100
pacing = "paced"
when_infeasible = "refuse"

[classes.batch]
"""
MIX: Mapping[str, float] = {"interactive": 0.4, "standard": 0.4, "batch": 0.2}

_GOAL = 15.0  # percent
_FEW = 4  # requests in flight
_GRACE_S = 15.0
_MIN_HORIZON_S = "1"
_SEED = 1


class _Sizes(NamedTuple):
    """How long is measured: requests of the closed loops, seconds of the open ones."""

    limits: EngineLimits
    num_requests: int
    duration_s: float


class _Calibration(NamedTuple):
    """What the closed loops showed of the pair.

    Attributes:
        fitted: step times.
        transit_s: what all but the engine adds to a first token, with a few requests in flight.
        capacity: requests per second.
    """

    fitted: Fit
    transit_s: float
    capacity: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the experiment's flags."""
    parser.add_argument("--loads", default="1,2,3", metavar="X,...", help="multiples of the capacity (default: 1,2,3)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="length of each load (default: 20)")
    parser.add_argument("--max-retries", type=int, default=0, metavar="N", help="see chairlift-loadgen (default: 0)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="lengths and arrivals, scaled to a quarter (default: drawn, Poisson)"
    )
    parser.add_argument("--service-classes", type=Path, metavar="FILE", help="classes, in equal shares")


def run(settings: Settings) -> Outcome:
    """Runs the experiment."""
    options = settings.options
    limits = EngineLimits(
        shape="tiny" if settings.quick else "15M",
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=1024,
        threads=max(1, settings.threads - 1),
    )
    sizes = _Sizes(limits, 64 if settings.quick else 240, 2.0 if settings.quick else options.seconds)
    path = settings.scratch / "classes.toml"
    path.write_text(CLASSES if options.service_classes is None else options.service_classes.read_text())
    classes = classes_of(path)
    mix = MIX if options.service_classes is None else {}
    horizon = () if options.max_retries else ("--retry-horizon", _MIN_HORIZON_S)
    flags = ("--service-classes", str(path), *horizon)
    with served(limits, settings.scratch / "pair", frontend_flags=flags) as pair:
        calibration = _calibrate(pair, sizes, options.trace, settings)
        loads = [float(text) for text in options.loads.split(",")]
        comparisons = []
        for load in loads:
            trace = _arrivals(sizes, options.trace, load * calibration.capacity)
            run_data = _play(pair, trace, ServiceMix(classes=classes, weights=mix), options.max_retries)
            steps = pair.new_steps().steps
            simulated = _simulate(trace, limits, calibration, classes, mix)
            comparisons.append(compared(load, run_data, simulated))
            settings.progress(_progress(load, run_data, steps, calibration.fitted))
    return _outcome(comparisons, calibration)


def _calibrate(pair: ServedPair, sizes: _Sizes, path: Path | None, settings: Settings) -> _Calibration:
    """Runs the closed loops."""
    pair.new_steps()
    num_seqs, capacity, transit_s = sizes.limits.max_num_seqs, 0.0, 0.0
    spec = TargetSpec(f"grpc://{pair.address}")
    for concurrency in (1, _FEW, num_seqs):
        count = max(8, sizes.num_requests * concurrency // num_seqs)
        run_data = _whole(
            run_workload(
                with_arrivals(_lengths(sizes, path, count), at_once(count)),
                spec,
                RunOptions(workers=1, concurrency=concurrency),
            )
        )
        capacity = measure(run_data, MeasureOptions()).steady.throughput.requests_per_s
        if concurrency == _FEW:
            requests = run_data.requests
            engine_s = 1e-6 * (requests["server_queued_us"] + requests["server_prefill_us"])
            transit_s = max(0.0, percentile(1e-9 * (requests["first_ns"] - requests["sent_ns"]) - engine_s, 50))
    log = pair.new_steps()
    steps = list(log.steps)
    if len(steps) < MIN_STEPS or not capacity > 0:
        raise BenchmarkError(f"the calibration gave {len(steps)} steps and {capacity:g} requests/s")
    random.Random(_SEED).shuffle(steps)  # the test steps are of all three loops
    fitted = fit_steps(steps)
    for line in fit_lines(fitted, log.num_left_out):
        settings.progress(line)
    settings.progress(
        f"capacity {capacity:.3g} requests/s with {num_seqs} requests in flight; "
        f"{1e3 * transit_s:.1f} ms of a first token outside the engine with {_FEW}"
    )
    return _Calibration(fitted, transit_s, capacity)


def _lengths(sizes: _Sizes, path: Path | None, count: int) -> Trace:
    """The first requests of the trace, or drawn ones."""
    longest = sizes.limits.max_model_len - 1
    if path is None:
        whole = random_requests(2 * count, lognormal(200, 0.7), lognormal(40, 0.6), seed=_SEED)
    else:
        whole = scale_lengths(read_trace(path), 0.25)
    fitting = fit(whole, longest, "drop")
    if len(fitting) < count:
        raise BenchmarkError(f"{len(fitting)} requests fit into {longest} tokens, {count} are needed")
    return fitting.take(np.arange(count), "not needed")


def _arrivals(sizes: _Sizes, path: Path | None, rate: float) -> Trace:
    count = max(2, round(rate * sizes.duration_s))
    trace = _lengths(sizes, path, count)
    if path is not None:
        return at_rate(from_zero(trace), rate)
    arrival_s = gamma(rate, count, seed=_SEED)
    return with_arrivals(trace, arrival_s - arrival_s[0])


def _play(pair: ServedPair, trace: Trace, mix: ServiceMix, max_retries: int) -> RunData:
    options = RunOptions(
        workers=1, seed=_SEED, drain_timeout_s=_GRACE_S + 30.0 * (max_retries > 0), targets=mix, max_retries=max_retries
    )
    return _whole(run_workload(trace, TargetSpec(f"grpc://{pair.address}"), options))


def _whole(run_data: RunData) -> RunData:
    """Raises KeyboardInterrupt if the run was stopped by Ctrl-C or SIGTERM: no comparison is of a part."""
    if run_data.interrupted:
        raise KeyboardInterrupt
    return run_data


def _simulate(
    trace: Trace,
    limits: EngineLimits,
    calibration: _Calibration,
    classes: Mapping[str, ServiceClass],
    mix: Mapping[str, float],
) -> tuple[SimulationResult, Replay]:
    fleet = FleetOptions(
        num_engines=1,
        cost=calibration.fitted.mean_cost,
        policy=parse_policy(f"slo@{limits.max_num_batched_tokens}", list(classes.values())),
        kv_cache_tokens=limits.kv_cache_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=BLOCK_TOKENS,
        has_prefix_cache=False,
        noise=calibration.fitted.noise,
        transit_s=calibration.transit_s,
    )
    requests = requests_of(trace, classes, mix, _SEED)
    replay = Replay(requests, simulate(requests, fleet, requests[-1].arrival_s + _GRACE_S))
    return summarize([replay], fleet, class_names=classes), replay


def _progress(load: float, run_data: RunData, steps: tuple[TimedStep, ...], fitted: Fit) -> str:
    samples = samples_of(run_data)
    metrics = measure(run_data, samples=samples)
    verdict = judge(run_data, metrics, samples=samples)
    reasons = ", ".join(finding.title for finding in verdict.reasons)
    text = ", ".join(f"{100 * error:.0f} %" for error in fit_errors(fitted.cost, steps))
    ratios = f"{time_ratio(fitted.cost, steps):.2f} of its time ({fitted.time_ratio:.2f} in the calibration)"
    return (
        f"{load:g}x: {len(run_data.requests)} requests, {verdict.level} {reasons}\n"
        f"    {len(steps)} steps, error of the fit p50, p90, p99 {text}; all took {ratios}"
    )


def _outcome(comparisons: list[LoadComparison], calibration: _Calibration) -> Outcome:
    results, fitted = [Result("", "capacity", calibration.capacity, "requests/s")], calibration.fitted
    for one in comparisons:
        error, what = largest_error(one)
        results.append(
            Result("", f"{one.load:g}x: largest error of a percentile", 100 * error, "%", _GOAL, "at most", note=what)
        )
    raw: dict[str, Any] = {
        "fit": {
            "cost": fitted.cost._asdict(),
            "training_error": fitted.training_error,
            "test_error": fitted.test_error,
            "time_ratio": fitted.time_ratio,
        },
        "transit_s": calibration.transit_s,
        "loads": {f"{one.load:g}": one.raw() for one in comparisons},
    }
    return Outcome(tuple(results), raw, text=comparison_table(comparisons))
