"""Two servers that are the same look the same; one that is faster looks faster."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.checks.selfcheck import judge
from loadgen.comparison.comparable import Side
from loadgen.comparison.compare import Comparison, compare
from loadgen.errors import ComparisonError
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.record import RunData, Status
from loadgen.trace.schema import workload_digest
from tests.support.loadgen.runs import synthetic_run


def side(label: str, *runs: RunData) -> Side:
    return Side(label, runs, tuple(judge(run, measure(run)) for run in runs))


def compared(*sides: Side, resamples: int = 300, options: MeasureOptions | None = None) -> Comparison:
    return compare(sides, options, resamples=resamples)


def delayed(run: RunData, seed: int) -> RunData:
    """The same answers, each late by what a slow-changing load of the server costs."""
    count = len(run.requests)
    noise = np.convolve(np.random.default_rng(seed).standard_normal(count + 100), 0.8 ** np.arange(100.0))
    delay_ns = (30e6 * np.exp(0.5 * noise[100 : 100 + count])).astype(np.int64)
    requests, chunks = run.requests.copy(), run.chunks.copy()
    for column in ("first_ns", "last_ns", "ended_ns"):
        requests[column] += delay_ns
    chunks["arrived_ns"] += delay_ns[chunks["request"]]
    return replace(run, requests=requests, chunks=chunks)


def test_equal_servers_seldom_look_different() -> None:
    """40 A/A pairs whose latencies have a memory: every figure, over all of them, and TTFT by itself."""
    covered: dict[str, list[bool]] = {}
    for trial in range(40):
        first, second = (
            delayed(
                synthetic_run(150, seed=trial, noise_seed=10 * trial + k, output_tokens=(2, 4), num_workers=1),
                10 * trial + k,
            )
            for k in (1, 2)
        )
        for figure in compared(side("a", first), side("b", second), resamples=150).versus[0].figures:
            if figure.judged:
                covered.setdefault(figure.key, []).append(not figure.significant)
    assert len(covered["ttft_p50"]) == 40
    assert np.mean(covered["ttft_p50"]) >= 0.93
    assert np.mean([one for figures in covered.values() for one in figures]) >= 0.93


def test_only_repeats_that_may_be_compared_speak_of_the_servers() -> None:
    first, second = synthetic_run(100, noise_seed=1), synthetic_run(100, noise_seed=2)
    failed = synthetic_run(100, noise_seed=2, outcomes={Status.ERROR: 30})
    sides = {
        "repeats": (side("a", first, second), side("b", second, first)),
        "one of each": (side("a", first), side("b", second)),
        "forced": (side("a", first, second), side("b", second, failed)),
    }
    said = {
        name: {figure.of_servers for figure in compare(both, force=True, resamples=10).versus[0].figures}
        for name, both in sides.items()
    }
    assert said == {"repeats": {True}, "one of each": {False}, "forced": {False}}


def test_a_server_that_is_slower_to_begin_looks_so() -> None:
    first, second = synthetic_run(300, noise_seed=1), synthetic_run(300, noise_seed=2, ttft_ms=160)
    (versus,) = compared(side("slow", second), side("fast", first)).versus
    ttft = versus.figure("ttft_p50")
    assert ttft.significant
    assert ttft.effect.low < 0.5 < ttft.effect.high
    assert not versus.figure("tpot_p50").significant
    with pytest.raises(KeyError):
        versus.figure("speed")


def test_every_side_is_compared_with_the_first() -> None:
    runs = [synthetic_run(100, noise_seed=seed, ttft_ms=ttft_ms) for seed, ttft_ms in ((1, 80), (2, 160), (3, 40))]
    found = compared(*(side(label, run) for label, run in zip("abc", runs, strict=True)))
    assert (found.baseline, [versus.label for versus in found.versus]) == ("a", ["b", "c"])
    assert [round(versus.figure("ttft_p50").effect.value, 0) for versus in found.versus] == [2, 0]
    assert found.digest == workload_digest(runs[0].workload)


def test_repeats_are_paired_in_order_and_counted() -> None:
    sides = [
        side(label, *(synthetic_run(60, noise_seed=shift + k) for k in range(3)))
        for label, shift in (("a", 0), ("b", 9))
    ]
    assert compared(*sides).repeats == 3


def test_what_was_not_answered_everywhere_is_counted() -> None:
    failing = synthetic_run(100, noise_seed=2, outcomes={Status.ERROR: 3})
    (versus,) = compared(side("a", synthetic_run(100, noise_seed=1)), side("b", failing)).versus
    answered = int((failing.requests["status"] == Status.OK).sum())
    assert versus.requests - versus.paired == 100 - answered == 3
    assert versus.steady


def test_other_workloads_are_refused_unless_forced() -> None:
    sides = [side("a", synthetic_run(60)), side("b", synthetic_run(60, seed=3))]
    with pytest.raises(ComparisonError, match="arrival_s differs in"):
        compare(sides)
    assert compare(sides, force=True, resamples=20).problems
