"""Second by second, against sums made one request at a time."""

import numpy as np
import pytest

from loadgen.measure.timeseries import mean_present, peak_present, timeseries
from loadgen.record import Status
from tests.support.loadgen.runs import Answered, run_of, synthetic_run


@pytest.mark.parametrize("seed", range(10))
def test_mean_present_is_time_spent_over_time(seed: int) -> None:
    draw = np.random.default_rng(seed)
    come = np.where(draw.random(50) < 0.1, np.nan, draw.random(50) * 10)
    gone = np.where(draw.random(50) < 0.1, np.nan, come + draw.exponential(2.0, 50))
    edges = np.sort(draw.random(6) * 12)
    for low, high, mean in zip(edges[:-1], edges[1:], mean_present(come, gone, edges), strict=True):
        spent = sum(
            max(0.0, min(high, np.inf if np.isnan(until) else until) - max(low, since))
            for since, until in zip(come, gone, strict=True)
            if not np.isnan(since)
        )
        assert mean == pytest.approx(spent / (high - low), abs=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_peak_present_is_the_largest_count_at_any_arrival(seed: int) -> None:
    draw = np.random.default_rng(seed)
    come = np.where(draw.random(50) < 0.1, np.nan, draw.integers(0, 20, 50) / 2)
    gone = np.where(draw.random(50) < 0.1, np.nan, come + draw.integers(1, 8, 50) / 2)
    low, high = 2.0, 8.0
    there = [
        sum(since <= at and not until <= at for since, until in zip(come, gone, strict=True))
        for at in [low, *(since for since in come if low <= since <= high)]
    ]
    assert peak_present(come, gone, low, high) == max(there)


def test_every_column_of_a_small_run() -> None:
    run = run_of(
        [
            Answered(0.0, ((0.5, 2), (1.5, 3))),
            Answered(0.2, ((0.6, 1), (2.5, 4)), sent_s=0.4),
            Answered(1.1, status=Status.ERROR, ended_s=1.3, error="no"),
            Answered(2.0, status=Status.DROPPED),
        ],
        ended_s=2.6,
    )
    series = timeseries(run)
    assert series.start_s.tolist() == [0.0, 1.0, 2.0]
    assert series.offered.tolist() == [2, 1, 1]
    assert series.completed.tolist() == [0, 1, 1]
    assert series.failed.tolist() == [0, 1, 1]
    assert series.output_tokens.tolist() == [3, 3, 4]
    assert series.in_flight == pytest.approx([1.0 + 0.6, 0.5 + 1.0 + 0.2, 0.5])
    assert series.waiting == pytest.approx([0.2, 0.0, 0.0])
    assert series.ttft_p50_ms[0] == pytest.approx(450.0)
    assert series.ttft_p99_ms[0] == pytest.approx(499.0)
    assert np.isnan(series.ttft_p50_ms[1:]).all()


def test_sums_over_bins_are_the_runs() -> None:
    run = synthetic_run(300, outcomes={Status.ERROR: 3, Status.TIMEOUT: 4, Status.DROPPED: 5})
    for bin_s in (0.25, 1.0, 7.0):
        series = timeseries(run, bin_s=bin_s)
        assert series.offered.sum() * bin_s == pytest.approx(300)
        assert series.completed.sum() * bin_s == pytest.approx(288)
        assert series.failed.sum() * bin_s == pytest.approx(12)
        assert series.output_tokens.sum() * bin_s == pytest.approx(run.chunks["tokens"].sum())


def test_a_run_without_requests_has_one_empty_bin() -> None:
    series = timeseries(run_of([]))
    assert len(series.start_s) == 1
    assert series.offered.sum() == 0
