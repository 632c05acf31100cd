"""Summaries equal those of the list in which every sample stands as often as its weight says."""

import math
import random
import statistics

import numpy as np
import pytest

from loadgen.measure.quantiles import distribution, quantiles


def _slow_quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@pytest.mark.parametrize("seed", range(20))
def test_whole_weights_repeat_the_value(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.choice([1.0, 2.5, draw.random()]) for _ in range(draw.randint(1, 40))]
    weights = [draw.randint(1, 5) for _ in values]
    repeated = [value for value, weight in zip(values, weights, strict=True) for _ in range(weight)]
    found = distribution(np.array(values), (10.0, 75.0, 99.9), np.array(weights, dtype=np.float64))
    assert found.n == len(repeated)
    assert found.mean == pytest.approx(statistics.fmean(repeated))
    assert found.std == pytest.approx(statistics.pstdev(repeated), abs=1e-12)
    assert (found.min, found.max) == (min(values), max(values))
    for percentile in (10.0, 50.0, 75.0, 99.0, 99.9):
        assert found.at(percentile) == pytest.approx(_slow_quantile(repeated, percentile / 100))


@pytest.mark.parametrize("seed", range(20))
def test_unweighted_is_every_weight_one(seed: int) -> None:
    values = np.random.default_rng(seed).lognormal(size=1 + seed)
    shares = (0.0, 0.1, 0.5, 0.99, 1.0)
    assert quantiles(values, shares) == pytest.approx(quantiles(values, shares, np.ones(len(values))))
    assert quantiles(values, shares) == pytest.approx([_slow_quantile(values.tolist(), share) for share in shares])


def test_fractional_weights_shift_the_quantile_smoothly() -> None:
    values = np.array([1.0, 2.0, 3.0])
    whole, nearly = (quantiles(values, [0.3, 0.9], np.full(3, weight)) for weight in (4.0, 4.001))
    assert nearly == pytest.approx(whole, abs=0.01)
    light, heavy = (quantiles(values, [0.9], np.array([2.5, 2.5, last]))[0] for last in (0.5, 4.5))
    assert light < heavy == 3.0


def test_one_sample_is_all_of_its_percentiles() -> None:
    found = distribution(np.array([7.0]), (50.0, 99.9))
    assert found.n == 1
    assert found.std == 0.0
    assert {value for _, value in found.percentiles} == {7.0}
    assert distribution(np.array([7.0]), (50.0,), np.array([0.5])).p99 == 7.0


def test_nothing_measured_is_nan_and_nan_samples_are_left_out() -> None:
    empty = distribution(np.array([np.nan, np.nan]), (90.0,), np.array([1.0, 2.0]))
    assert empty.n == 0
    assert all(math.isnan(value) for value in (empty.mean, empty.std, empty.min, empty.max, empty.p50, empty.at(90.0)))
    some = distribution(np.array([np.nan, 1.0, 3.0]), (), np.array([9.0, 1.0, 1.0]))
    assert (some.n, some.mean) == (2, 2.0)


def test_median_and_99_are_always_there_and_others_only_when_asked_for() -> None:
    found = distribution(np.arange(101.0), (75.0,))
    assert [percentile for percentile, _ in found.percentiles] == [50.0, 75.0, 99.0]
    assert (found.p50, found.p99) == (50.0, 99.0)
    with pytest.raises(KeyError):
        found.at(90.0)
