"""Blocks are as long as the memory of a series asks for."""

import numpy as np
import pytest
from numpy.typing import NDArray

from loadgen.comparison.block_length import block_length


def autoregressive(count: int, memory: float, seed: int) -> NDArray[np.float64]:
    noise = np.random.default_rng(seed).standard_normal(count + 300)
    for index in range(1, len(noise)):
        noise[index] += memory * noise[index - 1]
    return noise[300:]


@pytest.mark.parametrize("memory", [0.5, 0.8, 0.9])
def test_it_is_three_times_the_best_length_for_an_autoregressive_series(memory: float) -> None:
    count = 4000
    best = (1.5 * (2 * memory / (1 - memory**2)) ** 2 * count) ** (1 / 3)  # in closed form: G / g = 2 r / (1 - r^2)
    found = np.median([block_length([autoregressive(count, memory, seed)]) for seed in range(25)])
    assert found == pytest.approx(3 * best, rel=0.2)


def test_noise_without_memory_needs_short_blocks() -> None:
    lengths = [block_length([np.random.default_rng(seed).standard_normal(1000)]) for seed in range(50)]
    assert np.median(lengths) <= 10
    assert max(lengths) < 100


def test_the_longest_memory_decides() -> None:
    short, long = autoregressive(1000, 0.0, 1), autoregressive(1000, 0.9, 2)
    assert block_length([short, long]) == block_length([long]) > block_length([short])


@pytest.mark.parametrize(
    "series",
    [
        np.zeros(0),
        np.ones(5),
        np.full(500, 3.7),
        0.1 * np.ones(50) + 0.2,
        np.tile([1.0, -1.0], 200),  # neighbours are opposite
    ],
    ids=["empty", "short", "constant", "constant after rounding", "alternating"],
)
def test_nothing_alike_is_length_one(series: NDArray[np.float64]) -> None:
    assert block_length([series]) == 1.0


def test_a_trend_asks_for_longer_blocks_than_a_fifth_of_the_run() -> None:
    rising = np.linspace(0.0, 1.0, 400) + 0.01 * np.random.default_rng(0).standard_normal(400)
    assert 80 < block_length([rising]) <= 400


def test_a_block_is_never_longer_than_the_series() -> None:
    assert block_length([np.linspace(0.0, 1.0, 12)]) <= 12
