"""Online softmax, 32 scores at a time, against fp64."""

import math

import numpy as np
import pytest
from numba import njit

from kernels.cpu.softmax_step import softmax_step

LOWEST = np.float32(-3.0e38)  # before any key has been seen
DIM = 48


@njit
def _step(scores, state, acc, acc_bytes):
    softmax_step(scores, state, acc, acc_bytes)


class Row:
    """State of one row, followed by NaN that must not be overwritten."""

    def __init__(self):
        self.state = np.array([LOWEST, 0, math.nan], dtype=np.float32)
        self.acc = np.full(DIM + 16, math.nan, dtype=np.float32)
        self.acc[:DIM] = 0

    def step(self, scores):
        """Returns the weights of 32 scores."""
        memory = np.full(48, math.nan, dtype=np.float32)
        memory[:32] = scores
        _step(memory.ctypes.data, self.state.ctypes.data, self.acc.ctypes.data, 4 * DIM)
        assert np.isnan(memory[32:]).all()
        assert np.isnan(self.state[2:]).all()
        assert np.isnan(self.acc[DIM:]).all()
        return memory[:32]

    @property
    def largest(self):
        return self.state[0]

    @property
    def total(self):
        return self.state[1]


@pytest.mark.parametrize("spread", [0.1, 1, 10, 60])
def test_weights_and_their_sum_are_those_of_fp64(spread):
    generator, row, seen = np.random.default_rng(0), Row(), []
    for _ in range(20):
        scores = (generator.standard_normal(32) * spread).astype(np.float32)
        seen.extend(scores.astype(np.float64))
        weights = row.step(scores)
        assert row.largest == max(seen)
        np.testing.assert_allclose(
            weights, np.exp(scores.astype(np.float64) - max(seen)), rtol=2e-6 * max(1, spread), atol=2e-38
        )
        np.testing.assert_allclose(row.total, np.exp(np.array(seen) - max(seen)).sum(), rtol=1e-5)


@pytest.mark.parametrize("place", range(32))
def test_largest_score_is_found_at_any_place(place):
    row, scores = Row(), np.linspace(-2, -1, 32, dtype=np.float32)
    scores[place] = 5
    weights = row.step(scores)
    assert (row.largest, weights[place]) == (5, 1)
    assert np.delete(weights, place).max() < 0.01


def test_earlier_sums_are_rescaled_by_a_larger_score():
    row = Row()
    row.step(np.full(32, 1.0))
    row.acc[:DIM] = np.arange(DIM)
    row.step(np.full(32, 3.0))
    np.testing.assert_allclose(row.acc[:DIM], np.arange(DIM) * math.exp(-2), rtol=1e-6)
    np.testing.assert_allclose(row.total, 32 * math.exp(-2) + 32, rtol=1e-6)


def test_earlier_sums_are_unchanged_by_smaller_scores():
    row = Row()
    row.step(np.full(32, 1.0))
    row.acc[:DIM] = before = np.random.default_rng(0).standard_normal(DIM).astype(np.float32)
    for score in (1.0, -50.0):
        row.step(np.full(32, score))
        assert (row.acc[:DIM] == before).all()
    assert row.largest == 1


def test_hidden_scores_have_zero_weight():
    """Also in a row that has seen no key yet, and if all 32 scores are hidden."""
    row, masked = Row(), np.full(32, -math.inf)
    assert not row.step(masked).any()
    assert (row.total, row.largest) == (0, LOWEST)
    scores = masked.copy()
    scores[7] = -2
    assert row.step(scores).tolist() == [0] * 7 + [1] + [0] * 24
    assert not row.step(masked).any()
    assert (row.total, row.largest) == (1, -2)
    assert (row.acc[:DIM] == 0).all()


def test_weights_below_the_least_normal_number_are_zero():
    row, scores = Row(), np.zeros(32)
    scores[1:4] = -86.9, -87.1, -1e30
    weights = row.step(scores)
    assert weights[1] > 0
    assert weights[2:4].tolist() == [0, 0]


@pytest.mark.parametrize("place", [0, 15, 16, 31])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_score_makes_the_sum_nan(bad, place):
    row, scores = Row(), np.zeros(32)
    row.step(scores)
    scores[place] = bad
    row.step(scores)
    assert math.isnan(row.total)
    row.step(np.full(32, 9.0))
    assert math.isnan(row.total)
