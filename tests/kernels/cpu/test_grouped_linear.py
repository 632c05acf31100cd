"""Linear layers on integers in groups against their dequantised values, and with inputs in int8 against exact sums."""

import math

import pytest
import torch

from kernels.cpu.group_factors import MAX_EXPANDED, FactorsForm
from kernels.cpu.packed_linear import Kind
from kernels.families import cpu_ops
from kernels.grouped_weights import GroupedWeights, Superblocks
from tests.support.kernels.batches import assert_same_bits, normal

NUM_ROWS = [*range(1, 15), 24, 97, 130]  # up to three tiles, and two blocks of tiles


def integers(low, high, *shape, seed=0, dtype=torch.uint8):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def in_superblocks(n, k, group_size, num_bits, *, zero=None):
    """Makes superblocks of 256 inputs, with scales and offsets of both signs; zero: the zero point of all groups."""
    units = [(normal(n, k // 256, seed=seed) * k**-0.5 / 600).half() for seed in (1, 2)]
    codes = [integers(-128, 128, n, k // group_size, seed=seed, dtype=torch.int8) for seed in (3, 4)]
    if zero is not None:
        units[1], codes[1] = -zero * units[0], codes[0]
    blocks = Superblocks(units[0], codes[0], units[1], codes[1])
    values = integers(0, 2**num_bits, n, k)
    return GroupedWeights(values, blocks.scales, blocks.offsets, num_bits, superblocks=blocks)


def in_groups(n, k, group_size, num_bits, *, form):
    """Makes groups whose scales and offsets need this form."""
    scales = normal(n, k // group_size, seed=1) * k**-0.5 / 2**num_bits
    halves, shape = scales.half().float(), scales.shape
    scales, offsets = {
        FactorsForm.FP32: (scales, normal(*shape, seed=2) * k**-0.5),
        FactorsForm.SCALES: (halves, -(2 ** (num_bits - 1)) * halves),
        FactorsForm.ZERO_POINTS: (halves, -integers(0, 17, *shape, seed=3).float() * halves),
        FactorsForm.SCALES_AND_OFFSETS: (halves, (normal(*shape, seed=2) * k**-0.5).half().float()),
    }[form]
    return GroupedWeights(integers(0, 2**num_bits, n, k), scales, offsets, num_bits)


FORMS = [
    (in_groups(97, 256, 32, 4, form=FactorsForm.FP32), FactorsForm.FP32, 6),
    (in_groups(5, 72, 24, 8, form=FactorsForm.FP32), FactorsForm.FP32, 8 + 64 / 24),
    (in_groups(211, 384, 128, 4, form=FactorsForm.SCALES), FactorsForm.SCALES, 4 + 16 / 128),
    (in_groups(33, 64, 32, 8, form=FactorsForm.SCALES), FactorsForm.SCALES, 8.5),
    (in_groups(64, 256, 128, 4, form=FactorsForm.ZERO_POINTS), FactorsForm.ZERO_POINTS, 4 + 24 / 128),
    (in_groups(31, 96, 32, 4, form=FactorsForm.SCALES_AND_OFFSETS), FactorsForm.SCALES_AND_OFFSETS, 5),
    (in_superblocks(97, 512, 32, 4), FactorsForm.SUPERBLOCKS, 4.625),
    (in_superblocks(33, 256, 32, 8), FactorsForm.SUPERBLOCKS, 8.625),
    (in_superblocks(2062, 256, 16, 4), FactorsForm.SUPERBLOCKS, 4 + 1.125),
    (in_superblocks(130, 512, 16, 8, zero=32), FactorsForm.SUPERBLOCKS_OF_SCALES, 8.5625),
    (in_superblocks(130, 512, 32, 5), FactorsForm.SUPERBLOCKS, 5.625),
    (in_superblocks(130, 512, 16, 6, zero=32), FactorsForm.SUPERBLOCKS_OF_SCALES, 6.5625),
    (in_groups(31, 96, 32, 5, form=FactorsForm.SCALES_AND_OFFSETS), FactorsForm.SCALES_AND_OFFSETS, 6),
    (in_superblocks(33, 256, 16, 5), FactorsForm.SUPERBLOCKS, 5 + 1.125),
    (in_groups(97, 96, 24, 6, form=FactorsForm.FP32), FactorsForm.FP32, 6 + 64 / 24),
    (in_groups(33, 48, 24, 5, form=FactorsForm.FP32), FactorsForm.FP32, 6 + 64 / 24),  # 48 high bits fill no words
    (in_groups(33, 40, 8, 6, form=FactorsForm.FP32), FactorsForm.FP32, 8 + 64 / 8),
]
"""Weights, the form in which their scales and offsets are kept, and the bits per weight."""


IDS = [f"{'x'.join(map(str, weights.values.shape))} {form.name}" for weights, form, _ in FORMS]


@pytest.mark.parametrize(("weights", "form", "bits"), FORMS, ids=IDS)
def test_products_have_the_bits_of_the_dequantised_weights(weights, form, bits):
    ops, (n, k) = cpu_ops(), weights.values.shape
    bias = normal(n, seed=5)
    packed = ops.pack_grouped(weights, bias, torch.float32)
    plain = ops.pack_linear(weights.dequantized(torch.float32), bias)
    assert packed.factors_form is form
    assert 8 * (packed.weight.nbytes + packed.scales.nbytes + packed.codes.nbytes) == (n + -n % 32) * k * bits
    for num_rows in NUM_ROWS:
        x = normal(num_rows, k, seed=num_rows)
        assert_same_bits(ops.linear(x, packed), ops.linear(x, plain))


@pytest.mark.parametrize("group_size", [2, 12, 66])
def test_groups_that_fill_no_words_are_dequantised(group_size):
    ops, weights = cpu_ops(), in_groups(33, 132, group_size, 8, form=FactorsForm.FP32)
    packed = ops.pack_grouped(weights, None, torch.float32)
    assert packed.kind is Kind.FP32
    assert torch.equal(packed.weight, ops.pack_linear(weights.dequantized(torch.float32), None).weight)


@pytest.mark.parametrize(
    ("num_groups", "form"),
    [
        (MAX_EXPANDED // 4 + 1, FactorsForm.SCALES),  # of 32 columns fit into scratch memory, of 64 do not
        (MAX_EXPANDED // 2, FactorsForm.SCALES),
        (MAX_EXPANDED // 2 + 1, FactorsForm.FP32),
    ],
)
def test_factors_of_many_groups_fit_into_scratch_memory(num_groups, form):
    ops, weights = cpu_ops(), in_groups(70, 8 * num_groups, 8, 4, form=FactorsForm.SCALES)
    packed = ops.pack_grouped(weights, None, torch.float32)
    assert packed.factors_form is form
    plain = ops.pack_linear(weights.dequantized(torch.float32), None)
    for num_rows in (1, 13):
        x = normal(num_rows, 8 * num_groups)
        assert_same_bits(ops.linear(x, packed), ops.linear(x, plain))


@pytest.fixture(scope="module")
def int8_ops():
    return cpu_ops(quantization="int8")


def quantised(x, group_size):
    """Returns the nearest multiples of 1 / 127 of the largest value of each group, and these factors, in fp64."""
    groups = x.view(len(x), -1, group_size)
    largest = groups.abs().amax(dim=2, keepdim=True)
    return (groups * (127 / largest)).round().double(), (largest / 127).double()


@pytest.mark.parametrize(("weights", "form", "bits"), FORMS, ids=IDS)
def test_inputs_in_int8_are_off_by_their_rounding_only(int8_ops, weights, form, bits):
    """Beside it there are roundings of fp32: of a scale times a sum, of each of two terms of a group, and of a scaled
    sum of inputs.
    """
    n, k = weights.values.shape
    bias, group_size = normal(n, seed=5), weights.group_size
    packed = int8_ops.pack_grouped(weights, bias, torch.float32)
    assert packed.kind is Kind.INT8_BY_GROUPS
    assert packed.factors_form is form
    assert 8 * (packed.weight.nbytes + packed.scales.nbytes + packed.codes.nbytes) == (n + -n % 32) * k * bits
    scales, offsets = weights.scales.double(), weights.offsets.double()
    values = weights.values.double().view(n, -1, group_size)
    for num_rows in (1, 2, 7, 130):
        x = normal(num_rows, k, seed=num_rows)
        rounded, units = quantised(x, group_size)
        sums, of_inputs = torch.einsum("tgi,ogi->tog", rounded, values), rounded.sum(dim=2)[:, None]
        want = ((sums * scales + of_inputs * offsets) * units.transpose(1, 2)).sum(dim=2) + bias.double()
        magnitudes = ((sums * scales).abs() + (of_inputs * offsets).abs()) * units.transpose(1, 2)
        bound = (3 + 2 * scales.shape[1]) * 2**-24 * (magnitudes.sum(dim=2) + bias.abs())
        assert ((int8_ops.linear(x, packed) - want).abs() <= bound).all()


@pytest.mark.parametrize("num_bits", [4, 5, 6, 8])
def test_sums_of_int8_products_are_exact(int8_ops, num_bits):
    """Groups with a value of 127 are not rounded; all sums are integers below 2^24."""
    k, group_size = 128, 32
    x = integers(-127, 128, 40, k, dtype=torch.int32, seed=1).float()
    x[:, ::group_size] = 127
    scales = 1 + integers(0, 2, 97, k // group_size, seed=2).float()
    weights = GroupedWeights(integers(0, 2**num_bits, 97, k, seed=3), scales, -3 * scales, num_bits)
    want = x.double() @ weights.dequantized(torch.float64).T
    assert int(want.abs().max()) < 2**24
    assert torch.equal(int8_ops.linear(x, int8_ops.pack_grouped(weights, None, torch.float32)), want.float())


@pytest.mark.parametrize("index", [0, 1, 6, 9, 10, 11])
def test_inputs_in_int8_give_a_row_the_same_bits_among_any_others(int8_ops, index):
    weights = FORMS[index][0]
    layer = int8_ops.pack_grouped(weights, None, torch.float32)
    x = normal(max(NUM_ROWS), weights.values.shape[1])
    alone = torch.cat([int8_ops.linear(row, layer) for row in x.split(1)])
    for num_rows in NUM_ROWS:
        start = (len(x) - num_rows) * 2 // 3
        assert_same_bits(int8_ops.linear(x[start : start + num_rows], layer), alone[start : start + num_rows])
    threads = cpu_ops(quantization="int8", num_threads=3)
    assert_same_bits(threads.linear(x, threads.pack_grouped(weights, None, torch.float32)), alone)


@pytest.mark.parametrize("index", [0, 1, 6, 10, 11])
@pytest.mark.parametrize("num_rows", [1, 13])
def test_inputs_in_int8_are_taken_in_their_order(int8_ops, index, num_rows):
    weights = FORMS[index][0]
    k = weights.values.shape[1]
    order, x = torch.randperm(k, generator=torch.Generator().manual_seed(3)), normal(num_rows, k)
    got = int8_ops.linear(x, int8_ops.pack_grouped(weights._replace(input_order=order), None, torch.float32))
    plain = int8_ops.pack_grouped(weights, None, torch.float32)
    assert_same_bits(got, int8_ops.linear(x[:, order].contiguous(), plain))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_rows", [1, 13])
def test_a_row_that_is_not_finite_fails_alone(int8_ops, num_rows, bad):
    weights = FORMS[0][0]
    layer, x = int8_ops.pack_grouped(weights, None, torch.float32), normal(num_rows, 256)
    clean, poisoned = int8_ops.linear(x, layer), num_rows // 2
    x[poisoned, 200] = bad
    got = int8_ops.linear(x, layer)
    others = [row for row in range(num_rows) if row != poisoned]
    assert not got[poisoned].isfinite().any()
    assert_same_bits(got[others], clean[others])


def test_rows_of_zeros_give_the_bias(int8_ops):
    weights, bias = FORMS[6][0], normal(97, seed=5)
    layer = int8_ops.pack_grouped(weights, bias, torch.float32)
    assert_same_bits(int8_ops.linear(torch.zeros(3, 512), layer), bias.expand(3, 97))


def test_weights_of_superblocks_in_smaller_groups_are_the_same():
    weights = in_superblocks(5, 256, 32, 4)
    finer = weights.in_groups_of(16)
    assert (finer.group_size, finer.superblocks.scale_codes.shape) == (16, (5, 16))
    assert torch.equal(finer.superblocks.offsets, finer.offsets)
    assert torch.equal(finer.dequantized(torch.float32), weights.dequantized(torch.float32))
