"""Quantisation of rows of activations to bytes."""

import math

import numpy as np
import pytest

from kernels.cpu.quantize import quantize_row, rounded

GUARD = 0x55


def quantize(values, depth=None):
    """Returns (values, scale) of a quantised row; checks its padding and the memory behind it."""
    x = np.array(values, dtype=np.float32)
    depth = -(-len(x) // 4) if depth is None else depth
    memory = np.full(4 * depth + 64, GUARD, dtype=np.uint8)
    scale = quantize_row(x, memory.ctypes.data, depth)
    assert (memory[len(x) : 4 * depth] == 128).all()
    assert (memory[4 * depth :] == GUARD).all()
    return memory[: len(x)].astype(np.int64) - 128, np.float32(scale)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 15, 16, 17, 64, 67, 1031])
def test_values_are_rounded_to_the_nearest_step(n):
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    quantized, scale = quantize(x)
    largest = np.abs(x).max()
    assert scale == largest / np.float32(127)
    assert np.abs(quantized).max() == 127
    assert (np.abs(quantized * (largest.astype(np.float64) / 127) - x) <= largest / 254 * 1.0001).all()


def test_halves_go_to_the_even_neighbour():
    quantized, scale = quantize([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, -0.51])
    assert quantized.tolist() == [127, 0, 2, 2, 0, -2, -2, 0, -1]
    assert scale == 1


def test_the_depth_may_exceed_the_row():
    assert quantize([1, -1, 0], depth=40)[0].tolist() == [127, -127, 0]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("largest", [1e-29, 1e-3, 1.0, 3.3, 1e30, 3.4e38])
def test_the_largest_value_is_exact_at_any_magnitude(largest, sign):
    quantized, scale = quantize([sign * largest, largest / 2, 0])
    assert quantized.tolist() == [127 * sign, 64, 0]
    assert scale == np.float32(largest) / np.float32(127)


@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-45, 1e-38, 1e-31])
def test_values_whose_scale_factor_would_overflow_become_zero(largest):
    """127 / largest would overflow."""
    quantized, scale = quantize([largest, -largest, 0, 0, largest])
    assert not quantized.any()
    assert scale == np.float32(largest) / np.float32(127)


@pytest.mark.parametrize("place", [0, 1, 33, 66])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_makes_the_scale_nan(bad, place):
    x = np.linspace(-3, 3, 67)
    x[place] = bad
    assert math.isnan(quantize(x)[1])


def test_rounding_has_no_flag_by_which_it_could_be_fused():
    """ARM compilers fuse an addition that may be contracted with the product before it: 63.49999 becomes 63, not 64."""
    rounded(np.float32(1))
    (code,) = rounded.inspect_llvm().values()
    additions = [line for line in code.splitlines() if " fadd " in line]
    assert additions
    assert not any(flag in line for line in additions for flag in ("contract", "reassoc", "fast"))
