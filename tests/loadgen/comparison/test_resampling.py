"""Draws by counting equal draws by writing out every value again."""

import numpy as np
import pytest
from numpy.typing import NDArray

from loadgen.comparison.resampling import Sample, Statistic, draw_blocks, replicates


def same(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values


def drawn_units(num_units: int, block: int, count: int, seed: int) -> list[list[int]]:
    """The units of each draw, one by one."""
    blocks = -(-num_units // block)
    starts = np.random.default_rng(seed).integers(0, num_units, (count, blocks))
    return [[(start + step) % num_units for start in row for step in range(block)] for row in starts.tolist()]


@pytest.mark.parametrize(("num_units", "block"), [(1, 1), (7, 1), (7, 3), (7, 7), (50, 8)])
def test_blocks_are_whole_and_go_around_the_end(num_units: int, block: int) -> None:
    draws = draw_blocks(num_units, block, 40, np.random.default_rng(5))
    expected = [np.bincount(units, minlength=num_units) for units in drawn_units(num_units, block, 40, 5)]
    np.testing.assert_array_equal(draws, expected)


@pytest.mark.parametrize("share", [None, 0.5, 0.99])
@pytest.mark.parametrize("weighted", [False, True])
def test_replicates_are_the_statistics_of_what_was_drawn(share: float | None, weighted: bool) -> None:
    rng = np.random.default_rng(3)
    num_units, block, count = 30, 4, 50
    pair = []
    for _ in range(2):
        unit = np.sort(rng.integers(0, num_units, 90))
        weights = rng.integers(1, 4, 90).astype(float) if weighted else None
        pair.append(Sample(rng.lognormal(size=90), unit, weights))
    statistic = Statistic(share)
    found = replicates(
        (pair[0], pair[1]), num_units, statistic, same, block_units=block, resamples=count, rng=np.random.default_rng(8)
    )

    def brute(sample: Sample, units: list[int]) -> float:
        weights = np.ones(90) if sample.weights is None else sample.weights
        values = [
            value
            for unit in units
            for value, weight in zip(sample.values[sample.unit == unit], weights[sample.unit == unit], strict=True)
            for _ in range(int(weight))
        ]
        return float(np.mean(values)) if share is None else float(np.quantile(values, share, method="inverted_cdf"))

    every = list(range(num_units))
    difference = np.array(
        [brute(pair[1], units) - brute(pair[0], units) for units in drawn_units(num_units, block, count, 8)]
    )
    # Undrawn figures interpolate between ranks, drawn ones do not; that shift is taken off.
    shift = (brute(pair[1], every) - brute(pair[0], every)) - (statistic.of(pair[1]) - statistic.of(pair[0]))
    np.testing.assert_allclose(found, difference - shift, rtol=1e-5, atol=1e-6)


def test_rounding_many_values_is_small_against_the_spread() -> None:
    rng = np.random.default_rng(1)
    first, second = (Sample(rng.lognormal(size=20_000), np.arange(20_000) // 20) for _ in range(2))
    for share in (0.5, 0.99):
        found = replicates(
            (first, second), 1000, Statistic(share), same, block_units=1, resamples=200, rng=np.random.default_rng(2)
        )
        draws = draw_blocks(1000, 1, 200, np.random.default_rng(2)).astype(int)
        exact = []
        for row in draws:
            quantile = [
                np.quantile(np.repeat(one.values, row[one.unit]), share, method="inverted_cdf")
                for one in (first, second)
            ]
            exact.append(quantile[1] - quantile[0])
        assert np.abs(found - exact).max() < 0.2 * np.std(exact)  # a twentieth of the largest, which are 3 to 4 sigma
        assert np.quantile(found, (0.025, 0.975)) == pytest.approx(np.quantile(exact, (0.025, 0.975)), rel=0.06)


def test_more_units_than_are_drawn_one_by_one_are_drawn_in_groups() -> None:
    """Of 4,500 units always 5 neighbours come together: their own differences cannot show."""
    unit = np.arange(4500)
    inside_a_group = Sample(np.tile([1.0, 2.0, 3.0, 4.0, 5.0], 900), unit)
    flat = Sample(np.full(4500, 3.0), unit)
    found = replicates(
        (flat, inside_a_group), 4500, Statistic(), same, block_units=1, resamples=20, rng=np.random.default_rng(0)
    )
    np.testing.assert_allclose(found, 0.0, atol=1e-6)


def test_a_fifth_of_the_run_is_the_longest_block_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(num_units: int, block_units: int, count: int, rng: np.random.Generator) -> NDArray[np.float32]:
        asked.append(block_units)
        return draw_blocks(num_units, block_units, count, rng)

    monkeypatch.setattr("loadgen.comparison.resampling.draw_blocks", spy)
    sample = Sample(np.arange(100.0), np.arange(100))
    replicates((sample, sample), 100, Statistic(), same, block_units=70, resamples=5, rng=np.random.default_rng(0))
    assert asked == [20]


def test_an_empty_sample_has_no_statistic() -> None:
    empty = Sample(np.zeros(0), np.zeros(0, dtype=np.int64))
    assert np.isnan(Statistic().of(empty))
    assert np.isnan(Statistic(0.5).of(empty))
