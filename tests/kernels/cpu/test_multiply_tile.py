"""Matrix tiles of every height and kind, against fp64 or exact integers; a row has the same bits at any height."""

import math

import numpy as np
import pytest

from kernels.cpu.multiply_tile import (
    WEIGHTS_STEP,
    add_values,
    multiply_fp32,
    multiply_int8,
    multiply_int8_weights,
    score_keys,
)
from kernels.cpu.tile import LANES, MAX_ROWS

DEPTHS = [1, 2, 3, 64, 1031]
WIDE = pytest.mark.parametrize("wide", [False, True], ids=["32 columns", "64 columns"])
INT8 = pytest.mark.parametrize("is_int8", [False, True], ids=["fp32", "int8"])
SIZES = pytest.mark.parametrize("size", [1, 2, 4], ids=["int8", "bf16", "fp32"])
MARGIN = 16  # columns behind a tile that must stay as they were


def heights(*, wide):
    return range(1, (MAX_ROWS // 2 if wide else MAX_ROWS) + 1)


def random(*shape, is_int8=False, seed=0):
    generator = np.random.default_rng((seed, *shape))
    if is_int8:
        return generator.integers(-127, 128, shape, dtype=np.int8)
    return generator.standard_normal(shape).astype(np.float32)


def stored(*shape, size):
    """Returns elements of a cache of this size, and the numbers that they stand for."""
    if size != 2:
        elements = random(*shape, is_int8=size == 1)
        return elements, elements.copy()
    halves = (random(*shape).view(np.uint32) >> 16).astype(np.uint16)
    return halves, (halves.astype(np.uint32) << 16).view(np.float32)


def panels(b):
    """[depth, columns] -> [columns / LANES, depth, LANES]."""
    return np.ascontiguousarray(b.reshape(b.shape[0], -1, LANES).transpose(1, 0, 2))


def assert_is_product(c, a, b, c0):
    """Compares within the rounding errors of sums in fp32; see test_linear."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    bound = 4 * math.sqrt(a.shape[1] + 1) * 2.0**-24 * (np.abs(a) @ np.abs(b) + np.abs(c0))
    assert (np.abs(c - (a @ b + c0)) <= bound).all()


def multiply(function, a, packed_a, b, c0, *, wide, scales=None, row_scales=None, bias=None):
    """Runs a tile of a linear layer, and checks that it writes its own columns only."""
    height, width = len(a), 64 if wide else 32
    c = np.full((height + 1, width + MARGIN), 77, dtype=np.float32)
    ones, zeros = np.ones(64, np.float32), np.zeros(64, np.float32)
    scales, row_scales, bias = (
        ones if scales is None else scales, ones if row_scales is None else row_scales, zeros if bias is None else bias
    )  # fmt: skip
    scaling = {
        multiply_fp32: (0,),  # from row to row of c0
        multiply_int8_weights: (scales.ctypes.data, bias.ctypes.data),
        multiply_int8: (scales.ctypes.data, row_scales.ctypes.data, bias.ctypes.data),
    }[function]
    address, depth = b.ctypes.data, b.shape[1]
    function(
        height, wide, packed_a.ctypes.data, address, depth, c0.ctypes.data, *scaling,
        c.ctypes.data, c.strides[0], address,
    )  # fmt: skip
    assert (c[:, width:] == 77).all()
    assert (c[height:] == 77).all()
    return c[:height, :width]


@WIDE
@INT8
@pytest.mark.parametrize("depth", DEPTHS)
def test_fp32_products(depth, is_int8, wide):
    function = multiply_int8_weights if is_int8 else multiply_fp32
    width = 64 if wide else 32
    a, b, c0 = random(MAX_ROWS, depth), random(depth, width, is_int8=is_int8), random(width)
    alone = [multiply(function, a[i : i + 1], a[i].copy(), panels(b), c0, wide=wide) for i in range(MAX_ROWS)]
    for height in heights(wide=wide):
        c = multiply(function, a[:height], np.ascontiguousarray(a[:height].T), panels(b), c0, wide=wide)
        assert_is_product(c, a[:height], b, c0)
        assert c.tobytes() == np.concatenate(alone[:height]).tobytes()


@INT8
def test_columns_have_the_same_bits_in_tiles_of_either_width(is_int8):
    function = multiply_int8_weights if is_int8 else multiply_fp32
    a, b, c0 = random(1, 301), random(301, 64, is_int8=is_int8), random(64)
    whole = multiply(function, a, a, panels(b), c0, wide=True)
    for start in (0, 32):
        columns = slice(start, start + 32)
        half = multiply(function, a, a, panels(b[:, columns]), c0[columns].copy(), wide=False)
        assert half.tobytes() == np.ascontiguousarray(whole[:, columns]).tobytes()


def test_terms_are_fused_and_added_in_order():
    """(1 + e)(1 - e) - 1 is exactly -e * e if fused; 2^30 absorbs the terms before it, not those after it."""
    e = 2.0**-13
    b = np.zeros((1, 1, 32), dtype=np.float32)
    b[:] = 1 - e
    c = multiply(
        multiply_fp32, np.ones((1, 1)), np.float32([1 + e]), panels(b[0]), np.full(32, -1, np.float32), wide=False
    )
    assert (c == -e * e).all()
    terms = np.float32([1, 2.0**30, -(2.0**30), 3])
    c = multiply(
        multiply_fp32, terms[None], terms, panels(np.ones((4, 32), np.float32)), np.zeros(32, np.float32), wide=False
    )
    assert (c == 3).all()


@WIDE
@pytest.mark.parametrize("depth", [*DEPTHS, 5000])
def test_int8_products_are_exact(depth, wide):
    """Products of unsigned and signed bytes, including the extremes."""
    width, generator = 64 if wide else 32, np.random.default_rng(depth)
    a = generator.integers(0, 256, (MAX_ROWS, 4 * depth), dtype=np.uint8)
    b = generator.integers(-128, 128, (4 * depth, width), dtype=np.int8)
    a[0], b[:, 0], b[:, 1] = 255, 127, -128
    c0 = generator.integers(-(10**6), 10**6, width, dtype=np.int32)
    fours = b.reshape(depth, 4, -1, LANES).transpose(2, 0, 3, 1)  # [panels, depth, LANES, 4]
    for height in heights(wide=wide):
        packed = np.ascontiguousarray(a[:height].view(np.int32).T)
        c = multiply(multiply_int8, a[:height], packed, np.ascontiguousarray(fours), c0, wide=wide)
        exact = a[:height].astype(np.int64) @ b.astype(np.int64) + c0
        assert (c == exact.astype(np.float32)).all()


@WIDE
@pytest.mark.parametrize("name", ["int8 weights", "int8"])
def test_sums_are_scaled_by_column_and_row_then_biased(name, wide):
    """factor = row scale * column scale is rounded, then sum * factor + bias."""
    width, height, depth = 64 if wide else 32, min(5, max(heights(wide=wide))), 7
    scales, row_scales, bias = random(width), random(height), random(width, seed=1)
    b = random(4 * depth, width, is_int8=True)
    if name == "int8":
        a = np.random.default_rng(2).integers(0, 256, (height, 4 * depth), dtype=np.uint8)
        fours = np.ascontiguousarray(b.reshape(depth, 4, -1, LANES).transpose(2, 0, 3, 1))
        packed, c0 = np.ascontiguousarray(a.view(np.int32).T), np.zeros(width, np.int32)
        c = multiply(multiply_int8, a, packed, fours, c0, wide=wide, scales=scales, row_scales=row_scales, bias=bias)
        sums, factors = (a.astype(np.int64) @ b).astype(np.float32), row_scales[:, None] * scales
    else:
        a = np.round(random(height, 4 * depth) * 10).astype(np.float32)  # whole numbers: sums are exact
        packed, c0 = np.ascontiguousarray(a.T), np.zeros(width, np.float32)
        c = multiply(multiply_int8_weights, a, packed, panels(b), c0, wide=wide, scales=scales, bias=bias)
        sums, factors = a @ b.astype(np.float32), scales
    assert c.tobytes() == (sums.astype(np.float64) * factors + bias).astype(np.float32).tobytes()


@SIZES
@pytest.mark.parametrize("head_dim", [2, 64, 80, 256])
def test_score_keys_of_two_groups_at_any_addresses(head_dim, size):
    keys, numbers = stored(5, head_dim, LANES, size=size)
    q, zeros = random(MAX_ROWS, head_dim), np.zeros(32, np.float32)
    for first, second in [(0, 1), (3, 0), (2, 2)]:
        step = (second - first) * keys.strides[0]
        both = np.concatenate((numbers[first], numbers[second]), axis=1)
        rows = []
        for height in range(1, MAX_ROWS + 1):
            scores = np.full((height + 1, 32), math.nan, np.float32)
            packed, k = np.ascontiguousarray(q[:height].T), keys[first].ctypes.data
            score_keys(
                size, height, packed.ctypes.data, k, step, head_dim, zeros.ctypes.data, scores.ctypes.data, k, step
            )
            assert_is_product(scores[:height], q[:height], both, 0)
            assert np.isnan(scores[height]).all()
            rows.append(scores[:height])
        assert all(part.tobytes() == rows[-1][: len(part)].tobytes() for part in rows)


@WIDE
@SIZES
@pytest.mark.parametrize("num_keys", [1, 2, 15, 16])
def test_add_values_reads_only_the_given_number_of_keys(num_keys, size, wide):
    head_dim, width = 96, 64 if wide else 32
    (values, numbers), weights = stored(16, head_dim, size=size), random(MAX_ROWS, 16)
    assert WEIGHTS_STEP == 4 * 32
    padded = np.full((MAX_ROWS, 32), math.nan, np.float32)
    padded[:, :num_keys] = weights[:, :num_keys]
    if size > 1:
        values[num_keys:] = np.nan if size == 4 else 0x7FC0
    before, rows = random(MAX_ROWS, width + MARGIN, seed=1), []
    for height in heights(wide=wide):
        acc = before.copy()
        v = values.ctypes.data + 32 * size  # columns 32 and on
        add_values(size, height, wide, padded.ctypes.data, v, head_dim, num_keys, acc.ctypes.data, acc.strides[0], v)
        added = numbers[:num_keys, 32 : 32 + width]
        assert_is_product(acc[:height, :width], weights[:height, :num_keys], added, before[:height, :width])
        assert (acc[:, width:] == before[:, width:]).all()
        assert (acc[height:] == before[height:]).all()
        rows.append(acc[:height, :width])
    assert all(part.tobytes() == rows[-1][: len(part)].tobytes() for part in rows)
