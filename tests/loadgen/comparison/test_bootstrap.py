"""Intervals cover the truth as often as they say, also where a queue makes neighbours alike."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from loadgen.comparison.block_length import block_length
from loadgen.comparison.bootstrap import Effect, effect, student_t
from loadgen.comparison.resampling import Sample, Statistic

Floats = NDArray[np.float64]
Pair = tuple[Floats, Floats]
MEDIAN, P99, MEAN = Statistic(0.5), Statistic(0.99), Statistic()


def sample(values: Floats) -> Sample:
    return Sample(values, np.arange(len(values)))


def compared(pairs: list[Pair], statistic: Statistic, *, resamples: int = 400) -> Effect:
    series = [one for first, second in pairs for one in (np.log(first), np.log(second), np.log(second / first))]
    return effect(
        [(sample(first), sample(second)) for first, second in pairs],
        len(pairs[0][0]),
        statistic,
        "ratio",
        block_units=block_length(series),
        resamples=resamples,
    )


def autoregressive(rng: np.random.Generator, count: int, memory: float) -> Floats:
    noise = rng.standard_normal(count + 200) * math.sqrt(1 - memory**2)
    return np.convolve(noise, memory ** np.arange(200.0))[200 : 200 + count]


def alike_neighbours(rng: np.random.Generator, count: int, memory: float) -> Pair:
    """Two runs of one workload: what each request brings is shared, how fast the server is at the time is not."""
    shared = 0.5 * rng.standard_normal(count)
    first, second = (np.exp(4 + shared + 0.4 * autoregressive(rng, count, memory)) for _ in range(2))
    return first, second


def waiting_in_a_queue(rng: np.random.Generator, count: int) -> Pair:
    """One server at half load, the same arrivals and lengths for both, Lindley's recursion."""
    arrivals, lengths = np.cumsum(rng.exponential(1, count)), 0.5 * rng.lognormal(-0.125, 0.5, count)
    runs = []
    for _ in range(2):
        latency, free = np.empty(count), 0.0
        for index, took in enumerate(lengths * rng.lognormal(0, 0.2, count)):
            free = max(free, arrivals[index]) + took
            latency[index] = free - arrivals[index]
        runs.append(latency)
    return runs[0], runs[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("draw", "statistic"),
    [
        (lambda rng: alike_neighbours(rng, 300, 0.5), MEDIAN),
        (lambda rng: alike_neighbours(rng, 300, 0.9), MEDIAN),
        (lambda rng: alike_neighbours(rng, 600, 0.9), P99),
        (lambda rng: alike_neighbours(rng, 300, 0.7), MEAN),
        (lambda rng: waiting_in_a_queue(rng, 400), MEDIAN),
        (lambda rng: waiting_in_a_queue(rng, 400), MEAN),
    ],
    ids=["median, some memory", "median, long memory", "p99, long memory", "mean", "median, queue", "mean, queue"],
)
def test_the_interval_of_two_equal_servers_covers_one(
    draw: Callable[[np.random.Generator], Pair], statistic: Statistic
) -> None:
    covered = 0
    for trial in range(100):
        found = compared([draw(np.random.default_rng([7, trial]))], statistic)
        covered += found.low <= 1 <= found.high
    assert covered >= 93


def test_drawing_single_requests_would_be_too_sure() -> None:
    """Why blocks are there: without them three of ten equal pairs look different."""
    covered = 0
    for trial in range(100):
        first, second = alike_neighbours(np.random.default_rng([7, trial]), 300, 0.9)
        found = effect([(sample(first), sample(second))], 300, MEDIAN, "ratio", resamples=500)
        covered += found.low <= 1 <= found.high
    assert covered < 75


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run_to_run", [0.0, 0.1])
@pytest.mark.parametrize("repeats", [3, 5])
def test_the_interval_of_repeats_covers_one_whether_or_not_runs_differ(repeats: int, run_to_run: float) -> None:
    covered = 0
    for trial in range(100):
        rng = np.random.default_rng([11, trial])
        pairs = []
        for _ in range(repeats):
            first, second = alike_neighbours(rng, 100, 0.5)
            level = np.exp(run_to_run * rng.standard_normal(2))
            pairs.append((first * level[0], second * level[1]))
        found = compared(pairs, MEDIAN)
        covered += found.low <= 1 <= found.high
    assert covered >= 93


def test_a_known_ratio_is_found() -> None:
    covered = 0
    for trial in range(100):
        first, second = alike_neighbours(np.random.default_rng([3, trial]), 300, 0.5)
        found = compared([(first, 1.8 * second)], MEDIAN)
        covered += found.low <= 1.8 <= found.high
        assert not found.low <= 1 <= found.high
    assert covered >= 93


def test_what_the_requests_bring_themselves_falls_out() -> None:
    """Latencies that differ a hundredfold between requests, and the same ratio for each: nothing is left to chance."""
    first = np.random.default_rng(0).lognormal(3, 2, 2000)
    found = compared([(first, 1.25 * first)], MEDIAN)
    assert (found.value, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25), rel=1e-3)


def test_one_run_against_itself_is_exactly_one() -> None:
    first = np.random.default_rng(0).lognormal(3, 1, 1500)
    assert compared([(first, first)], P99)[2:] == (1.0, 1.0, 1.0)


def test_one_pair_shows_its_figures_exactly_and_repeats_their_geometric_mean() -> None:
    rng = np.random.default_rng(0)
    pairs = [alike_neighbours(rng, 101, 0.5) for _ in range(3)]
    one = compared(pairs[:1], MEDIAN)
    assert (one.first, one.second) == (np.median(pairs[0][0]), np.median(pairs[0][1]))
    assert one.value == pytest.approx(one.second / one.first)
    several = compared(pairs, MEDIAN)
    medians = np.array([[np.median(values) for values in pair] for pair in pairs])
    assert (several.first, several.second) == pytest.approx(tuple(np.exp(np.log(medians).mean(axis=0))))
    assert several.value == pytest.approx(several.second / several.first)


def test_a_difference_of_shares() -> None:
    rng = np.random.default_rng(4)
    good, better = (rng.random(2000) < 0.8).astype(float), (rng.random(2000) < 0.9).astype(float)
    found = effect([(sample(good), sample(better))], 2000, MEAN, "difference", resamples=1000)
    assert found.value == pytest.approx(better.mean() - good.mean())
    half = 1.96 * math.sqrt((0.8 * 0.2 + 0.9 * 0.1) / 2000)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.15)


def test_a_ratio_to_nothing_is_not_a_number() -> None:
    values = np.ones(30)
    for first, second in ((0 * values, values), (values, 0 * values)):
        found = effect([(sample(first), sample(second))], 30, MEDIAN, "ratio", resamples=50)
        assert (found.first, found.second) == (first[0], second[0])
        assert all(math.isnan(one) for one in (found.value, found.low, found.high))


def test_a_draw_without_a_value_leaves_no_interval() -> None:
    """One of thirty requests has the figure: most draws miss it."""
    lonely = Sample(np.array([5.0]), np.array([3]))
    found = effect([(lonely, lonely)], 30, MEDIAN, "ratio", resamples=50)
    assert found.value == 1.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_the_seed_decides() -> None:
    first, second = alike_neighbours(np.random.default_rng(0), 100, 0.5)

    def interval(seed: int) -> Effect:
        return effect([(sample(first), sample(second))], 100, MEDIAN, "ratio", resamples=100, seed=seed)

    assert interval(1) == interval(1) != interval(2)


@pytest.mark.parametrize(
    ("degrees", "value"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1e9, 1.95996)],
)
def test_students_t_is_that_of_the_tables(degrees: float, value: float) -> None:
    assert student_t(degrees) == pytest.approx(value, rel=2e-3)


def test_students_t_between_whole_degrees_lies_between() -> None:
    assert student_t(4) < student_t(3.5) < student_t(3)
