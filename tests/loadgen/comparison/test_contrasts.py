"""Figures of a comparison are those of the single reports, and a figure without enough behind it is not judged."""

import math

import numpy as np
import pytest

from loadgen.comparison.contrasts import (
    LATENCIES,
    Compared,
    Figure,
    compare_attainment,
    compare_latency,
    compare_tokens,
    due,
    measured,
)
from loadgen.comparison.resampling import Statistic
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.record import RunData, Status
from tests.support.loadgen.runs import Answered as Written
from tests.support.loadgen.runs import run_of, synthetic_run

RESAMPLES = 100
TTFT_P99 = Figure("ttft_p99", "TTFT p99", "ttft", Statistic(0.99), "ttft")


def judged(figure: Figure, *runs: RunData, resamples: int = RESAMPLES) -> Compared:
    """First half of the runs against the second half."""
    parts = measured(runs, MeasureOptions())
    half = len(parts) // 2
    chosen = np.logical_and.reduce([due(one) & one.samples.completed for one in parts])
    return compare_latency(figure, list(zip(parts[:half], parts[half:], strict=True)), chosen, resamples, 0)


@pytest.mark.parametrize("figure", LATENCIES, ids=lambda figure: figure.key)
def test_each_side_shows_the_figure_of_its_own_report(figure: Figure) -> None:
    runs = [synthetic_run(120, noise_seed=seed, tokens_per_message=3) for seed in (1, 2)]
    found = judged(figure, *runs)
    for run, value in zip(runs, found.effect[:2], strict=True):
        latencies = getattr(measure(run).steady.latencies, figure.column)
        share = figure.statistic.share
        assert value == pytest.approx(latencies.mean if share is None else latencies.at(100 * share))
    assert found.effect.value == pytest.approx(found.effect.second / found.effect.first)


def test_only_requests_that_were_answered_on_both_sides_count() -> None:
    """The slow ones failed in the second run; compared with all of the first it would look twice as fast."""
    slow = [index % 3 == 0 for index in range(90)]
    first = run_of([Written(0.1 * i, ((0.1 * i + (4.0 if slow[i] else 1.0), 1),)) for i in range(90)])
    second = run_of(
        [
            Written(0.1 * i, status=Status.ERROR, error="no room")
            if slow[i]
            else Written(0.1 * i, ((0.1 * i + 1.0, 1),))
            for i in range(90)
        ]
    )
    found = judged(Figure("e2e_mean", "", "e2e", Statistic(), "e2e"), first, second)
    assert found.effect.first == found.effect.second == pytest.approx(1000)


def test_a_p99_needs_enough_values_over_all_repeats() -> None:
    runs = [synthetic_run(250, noise_seed=seed) for seed in range(4)]
    alone = judged(TTFT_P99, runs[0], runs[2])
    assert not alone.judged
    assert not alone.significant
    assert (
        alone.note
        == f"not judged: a p99 needs 500 values, these are {int(due(measured(runs, MeasureOptions())[0]).sum())}"
    )
    assert alone.effect.value > 0
    more = [synthetic_run(260, noise_seed=seed) for seed in range(4)]
    assert judged(TTFT_P99, *more).judged


def test_few_answers_are_not_judged() -> None:
    found = judged(LATENCIES[0], synthetic_run(15), synthetic_run(15, noise_seed=9))
    assert not found.judged
    assert "20 are needed" in found.note


def test_a_p99_that_rests_on_one_burst_is_not_judged() -> None:
    """Twelve of 800 requests are slow. All in a row they are one episode; spread out they are twelve."""

    def slow_at(rows: range) -> RunData:
        rng = np.random.default_rng(0)
        took = np.where(np.isin(np.arange(800), rows), 5.0, 0.1 + 0.01 * rng.random(800))
        return run_of([Written(0.1 * i, ((0.1 * i + took[i], 1), (0.1 * i + took[i] + 0.5, 9))) for i in range(800)])

    burst, spread = slow_at(range(300, 312)), slow_at(range(0, 780, 65))
    assert judged(TTFT_P99, burst, burst).note.startswith("not judged: values beyond the p99 lie in fewer than 4")
    assert judged(TTFT_P99, spread, spread).judged


def test_a_run_that_drifts_says_that_its_interval_is_wide() -> None:
    found = judged(
        LATENCIES[0], synthetic_run(300, noise_seed=1, slowing=3.0, jitter=0.02), synthetic_run(300, noise_seed=2)
    )
    assert found.judged
    assert found.note.startswith("wanders: stretches of ")
    assert found.note.endswith("run longer")


def test_a_figure_nobody_has_is_not_a_number() -> None:
    """Answers of one message have no time per later token."""
    run = run_of([Written(0.1 * i, ((0.1 * i + 1.0, 1),)) for i in range(60)])
    for figure in LATENCIES:
        found = judged(figure, run, run)
        assert math.isnan(found.effect.first) == (figure.column in ("tpot", "itl"))
        assert found.judged == (figure.column not in ("tpot", "itl") and figure.statistic.share != 0.99)


def test_tokens_per_second_are_those_of_the_report() -> None:
    runs = [synthetic_run(200, noise_seed=seed) for seed in (1, 2)]
    first, second = measured(runs, MeasureOptions())
    found = compare_tokens([(first, second)], RESAMPLES, 0)
    for run, value in zip(runs, found.effect[:2], strict=True):
        assert value == pytest.approx(measure(run).steady.throughput.output_tokens_per_s)
    assert not found.significant


def test_attainment_counts_what_was_never_answered_as_bad() -> None:
    outcomes = {Status.ERROR: 15, Status.TIMEOUT: 10, Status.CANCELLED: 7}
    runs = [synthetic_run(200, noise_seed=1), synthetic_run(200, noise_seed=2, outcomes=outcomes)]
    options = MeasureOptions(slo={"ttft": 150.0, "tpot": 20.0})
    first, second = measured(runs, options)
    found = compare_attainment([(first, second)], options, RESAMPLES, 0)
    reported = measure(runs[1], options).steady.goodput
    assert found.effect.second == pytest.approx(reported.attainment)
    assert found.effect.value == pytest.approx(found.effect.second - found.effect.first)
    assert found.significant
    assert found.name == "Within all limits"
    assert compare_attainment([(first, second)], MeasureOptions(), RESAMPLES, 0).name == "Answered"


def test_a_burst_is_compared_over_the_whole_of_both_runs() -> None:
    burst = run_of([Written(0.0, ((1.0 + 0.1 * i, 1),)) for i in range(60)])
    steady = synthetic_run(60)
    assert not any(one.span.steady for one in measured([burst, burst], MeasureOptions()))
    mixed = measured([steady, burst], MeasureOptions())
    assert not any(one.span.steady for one in mixed)
    assert due(mixed[0]).all()


def test_warm_up_is_left_out() -> None:
    run = synthetic_run(200, rate=20.0)
    (one,) = measured([run], MeasureOptions(warmup_s=2.0))
    np.testing.assert_array_equal(due(one), run.workload.arrival_s >= 2.0)
