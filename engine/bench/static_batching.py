"""C1: continuous batching against static batches, in one and the same engine.

Claim: a seat that becomes empty is taken again in the next step, as no static batch does, and the steps this saves are
those that a simulation of the bare seats predicts.

Goal: steps saved within 5 % of the simulation; wall clock at least 90 % of the simulated ratio of steps.

Method: 256 requests, 32 prompt tokens each, output lengths exponential with mean 64, at most 512; 16 seats. Contestants
are two engines that differ in `scheduling_policy` only, `fcfs` and `static` (Orca, OSDI'22, calls them iteration-level
and request-level scheduling). The simulation takes the same lengths in the same order. Ids must be equal request by
request. The two ratios are not the same thing: a step of a static batch gets cheaper as its seats empty, so that the
wall clock gains less than the steps do. Both are printed, with the mean number of rows that the steps had.
"""

import argparse
import statistics
from collections.abc import Callable

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Benchmark, BenchmarkError, Outcome, Settings, positive
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload, exponential_workload
from engine.bench.serve import Run, engine, serve
from engine.bench.shapes import SHAPES, write_shape
from engine.bench.slot_simulator import continuous_steps, static_steps
from engine.config import EngineConfig
from engine.core.config import SchedulingPolicyName

_NUM_SEATS = 16
_PROMPT_LEN = 32
_POLICIES: tuple[SchedulingPolicyName, ...] = ("fcfs", "static")


def run(settings: Settings) -> Outcome:
    """Serves the workload under both policies in turn."""
    shape = "tiny" if settings.quick else settings.options.shape
    num_seats = 4 if settings.quick else _NUM_SEATS
    workload = _workload(shape, settings)
    model = str(write_shape(shape, settings.scratch))
    runs: dict[str, Run] = {}

    def contestant(policy: SchedulingPolicyName) -> Callable[[], float]:
        parts = engine(
            EngineConfig(
                model=model,
                load_format="dummy",
                max_num_seqs=num_seats,
                max_model_len=1024,
                scheduling_policy=policy,
                enable_prefix_caching=False,
                threads=settings.threads,
            )
        )

        def measure() -> float:
            runs[policy] = serve(parts, workload.prompts, workload.max_tokens)
            return runs[policy].wall_s

        return measure

    contestants: dict[str, Callable[[], float]] = {policy: contestant(policy) for policy in _POLICIES}
    samples = alternate(contestants, rounds=settings.rounds, progress=settings.progress)
    if runs["fcfs"].output_ids != runs["static"].output_ids:
        raise BenchmarkError("the two policies gave different tokens")
    steps = {policy: len(run.steps) for policy, run in runs.items()}
    simulated = {
        "fcfs": continuous_steps(workload.max_tokens, num_seats),
        "static": static_steps(workload.max_tokens, num_seats),
    }
    saved, simulated_saved = steps["static"] - steps["fcfs"], simulated["static"] - simulated["fcfs"]
    simulated_ratio = simulated["static"] / simulated["fcfs"]
    wall = samples.ratio("static", "fcfs")
    mean_rows = {policy: statistics.fmean(step.num_rows for step in run.steps) for policy, run in runs.items()}
    results = (
        Result(
            "C1",
            "steps saved, of those simulated",
            100 * saved / simulated_saved,
            "%",
            goal=95.0,
            floor=100.0,
            note=f"{steps['static']:,} static, {steps['fcfs']:,} continuous; simulated {simulated['static']:,}, "
            f"{simulated['fcfs']:,}",
        ),
        Result("C1", "steps, static over continuous", steps["static"] / steps["fcfs"], "x", floor=simulated_ratio),
        Result(
            "C1",
            "wall clock, static over continuous",
            wall.best,
            "x",
            goal=0.9 * simulated_ratio,
            floor=simulated_ratio,
            note=f"{wall.low:.2f}..{wall.high:.2f}; rows per step {mean_rows['static']:.1f} static, "
            f"{mean_rows['fcfs']:.1f} continuous",
        ),
    )
    return Outcome(
        results,
        raw={
            "seconds": samples.raw,
            "lengths": workload.max_tokens,
            "simulated_steps": simulated,
            "rows_of_steps": {policy: [step.num_rows for step in run.steps] for policy, run in runs.items()},
            "seconds_of_steps": {policy: [step.seconds for step in run.steps] for policy, run in runs.items()},
        },
    )


def _workload(shape: str, settings: Settings) -> Workload:
    num_requests, mean, cap = (12, 6.0, 24) if settings.quick else (settings.options.requests, 64.0, 512)
    vocab_size = SHAPES[shape].vocab_size
    return exponential_workload(num_requests, prompt_len=_PROMPT_LEN, mean=mean, cap=cap, vocab_size=vocab_size)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135M", help="default: 135M")
    parser.add_argument("--requests", type=positive, default=256, help="default: 256")


BENCHMARK = Benchmark("static-batching", ("C1",), "continuous against static batches", run, _add_arguments)
