"""Linear layers on CPUs against fp64 and exact integers; a row has the same bits among any others."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from kernels.cpu.linear import BLOCK_ROWS
from kernels.cpu.packed_linear import Int8Packing, Kind
from kernels.cpu.tile import MAX_ROWS
from kernels.families import cpu_ops
from kernels.grouped_weights import GroupedWeights
from kernels.microscaled_weights import MicroscaledWeights, NvFp4Weights
from tests.support.kernels.batches import assert_same_bits, normal

QUANTIZATIONS = [None, "int8"]
TWO_BYTES = [torch.bfloat16, torch.float16]
# Sizes around each boundary: of one vector, of a tile, of the groups of four bytes, of a long sum.
# With over 1,024 columns, few rows take them 64 at a time and many rows 32.
SHAPES = [(1, 1), (5, 3), (31, 7), (33, 64), (64, 33), (100, 130), (211, 66), (97, 1031), (2062, 129)]  # N, K
NUM_ROWS = [*range(1, 2 * MAX_ROWS + 3), BLOCK_ROWS + 33]  # up to three tiles; two blocks of tiles


def make_int8_weights_ops():
    """Makes operations that keep activations in fp32, as with int8 weights of a checkpoint that is meant for it."""
    ops = cpu_ops(quantization="int8")
    pack = ops.pack_linear

    def pack_linear(weight, bias):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "kernels.cpu.packed_linear.Int8Packing",
                lambda *sizes, has_int8_inputs: Int8Packing(*sizes, has_int8_inputs=False),
            )
            packed = pack(weight, bias)
        assert packed.kind is Kind.INT8_WEIGHTS
        return packed

    ops.pack_linear = pack_linear
    return ops


@pytest.fixture(scope="module", params=["fp32", "int8", "int8 weights"])
def ops(request):
    makers = {"fp32": cpu_ops, "int8": lambda: cpu_ops(quantization="int8"), "int8 weights": make_int8_weights_ops}
    return makers[request.param]()


@pytest.fixture(scope="module")
def int8_ops():
    return cpu_ops(quantization="int8")


def make_layer(n, k, *, bias=True):
    """Makes weights that keep outputs at unit scale, and a bias."""
    return normal(n, k, seed=1) * k**-0.5, normal(n, seed=2) if bias else None


@pytest.mark.sampled
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 5, 13, 129])
def test_products_are_those_of_fp64(num_rows, n, k, bias):
    """Rounding errors of a sum of K terms are below sqrt(K) u times the sum of magnitudes but for rare chance (Higham
    and Mary, doi:10.1137/18M1226312), u = 2^-24; of that four times, as one term may dominate.
    """
    ops = cpu_ops()
    x, (weight, biases) = normal(num_rows, k), make_layer(n, k, bias=bias)
    got = ops.linear(x, ops.pack_linear(weight, biases))
    zeros = torch.zeros(n, dtype=torch.float64) if biases is None else biases.double()
    want = x.double() @ weight.double().T + zeros
    magnitudes = x.double().abs() @ weight.double().abs().T + zeros.abs()
    assert (got.shape, got.dtype) == ((num_rows, n), torch.float32)
    assert ((got - want).abs() <= 4 * math.sqrt(k) * 2**-24 * magnitudes).all()


@pytest.mark.sampled
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(ops, n, k):
    """At the start of the batch and inside it."""
    x, layer = normal(max(NUM_ROWS), k), ops.pack_linear(*make_layer(n, k))
    alone = torch.cat([ops.linear(row, layer) for row in x.split(1)])
    for num_rows in NUM_ROWS:
        start = (len(x) - num_rows) * 2 // 3
        assert_same_bits(ops.linear(x[:num_rows], layer), alone[:num_rows])
        assert_same_bits(ops.linear(x[start : start + num_rows], layer), alone[start : start + num_rows])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TWO_BYTES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_weights_of_two_bytes_give_the_bits_of_their_fp32_values(quantization, dtype, n, k):
    """At every number of rows; subnormal numbers of fp16 are among the weights."""
    ops, x = cpu_ops(quantization=quantization), normal(max(NUM_ROWS), k)
    weight, bias = (part.to(dtype) for part in make_layer(n, k))
    weight[: n // 2, ::3] *= 2**-13
    packed, widened = ops.pack_linear(weight, bias), ops.pack_linear(weight.float(), bias.float())
    assert packed.weight.dtype is (torch.int8 if quantization else dtype)
    for num_rows in NUM_ROWS:
        assert_same_bits(ops.linear(x[:num_rows], packed), ops.linear(x[:num_rows], widened))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("n", "k"), [(100, 130), (97, 1031), (2062, 129)])
def test_more_threads_give_the_bits_of_one(quantization, n, k):
    """Also with more threads than cores."""
    x, want = normal(129, k), {}
    for num_threads in (1, 2, 5):
        ops = cpu_ops(quantization=quantization, num_threads=num_threads)
        layer = ops.pack_linear(*make_layer(n, k))
        for num_rows in (1, 7, 129) * 3:  # the threads share the work differently each time
            got = ops.linear(x[:num_rows], layer)
            assert_same_bits(got, want.setdefault(num_rows, got.clone()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_rows", [1, 12, 13, 30])
def test_non_finite_row_fails_alone(ops, num_rows, bad):
    k = 67
    weight, bias = make_layer(45, k)
    layer = ops.pack_linear(weight.abs() + 0.1, bias)  # no two infinities meet with opposite signs
    x = normal(num_rows, k)
    clean = ops.linear(x, layer)
    poisoned = num_rows // 2
    x[poisoned, k - 1] = bad
    got = ops.linear(x, layer)
    others = [row for row in range(num_rows) if row != poisoned]
    assert not got[poisoned].isfinite().any()
    assert_same_bits(got[others], clean[others])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_seen_in_every_result(ops, bad):
    """A damaged checkpoint fails in its first step, also if the weights are quantised."""
    weight, bias = make_layer(45, 67)
    x = normal(13, 67)
    clean = ops.linear(x, ops.pack_linear(weight, bias))
    weight[40, 5] = bad
    got = ops.linear(x, ops.pack_linear(weight, bias))
    others = [column for column in range(45) if column != 40]
    assert not got[:, 40].isfinite().any()
    assert_same_bits(got[:, others], clean[:, others])


def test_strided_rows_are_read_in_place(ops):
    """As slices of a fused projection, with NaN beside them."""
    layer = ops.pack_linear(*make_layer(45, 67))
    for num_rows in (1, 2, 30):
        wide = torch.full((num_rows, 200), math.nan)
        wide[:, 50:117] = normal(num_rows, 67)
        assert_same_bits(ops.linear(wide[:, 50:117], layer), ops.linear(wide[:, 50:117].clone(), layer))


def test_error_names_a_wrong_width(ops):
    layer = ops.pack_linear(*make_layer(5, 8))
    with pytest.raises(ValueError, match=r"x has shape \[3, 7\].* 8"):
        ops.linear(normal(3, 7), layer)
    with pytest.raises(ValueError, match=r"x is torch\.float16 on cpu"):
        ops.linear(normal(3, 8).half(), layer)
    with pytest.raises(ValueError, match=r"weight is torch\.float64 on cpu.* float32, bfloat16 or float16"):
        ops.pack_linear(normal(5, 8).double(), None)


def integers(num_rows, k, seed):
    """Returns integers in -127..127; each row contains 127 or -127."""
    values = torch.randint(-127, 128, (num_rows, k), generator=torch.Generator().manual_seed(seed))
    values[:, k // 2] = 127 - 254 * (torch.arange(num_rows) % 2)
    return values


def powers(num_rows, seed):
    """Returns a random power of two for each row."""
    exponents = torch.randint(-6, 7, (num_rows, 1), generator=torch.Generator().manual_seed(seed))
    return torch.ldexp(torch.ones(num_rows, 1), exponents)


@pytest.mark.sampled
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 5, 13, 129])
@pytest.mark.parametrize("make_ops", [lambda: cpu_ops(quantization="int8"), make_int8_weights_ops])
def test_int8_products_are_exact(make_ops, num_rows, n, k):
    """Rows of integers times powers of two are what 8 bits can hold: scale = largest magnitude / 127, no rounding. The
    sums are integers below 2^24, the scales powers of two: the result has to be right to the last bit.
    """
    x, x_scale = integers(num_rows, k, seed=0), powers(num_rows, seed=1)
    weight, weight_scale = integers(n, k, seed=2), powers(n, seed=3)
    sums = x @ weight.T
    assert int(sums.abs().max()) < 2**24
    ops = make_ops()
    layer = ops.pack_linear(weight * weight_scale, None)
    assert torch.equal(ops.linear(x * x_scale, layer), sums * x_scale * weight_scale.T)
    bias = normal(n, seed=4)
    layer = ops.pack_linear(weight * weight_scale, bias)
    want = (sums * x_scale.double() * weight_scale.T.double() + bias.double()).float()
    assert torch.equal(ops.linear(x * x_scale, layer), want)


@pytest.mark.parametrize(("x_value", "weight_value"), [(127, 127), (-127, 127), (127, -127), (-127, -127)])
def test_int8_sums_do_not_saturate(int8_ops, x_value, weight_value):
    """Pairs of such products exceed 16 bits, which is where some CPUs' instructions for bytes would clip them."""
    k = 1031
    layer = int8_ops.pack_linear(torch.full((33, k), float(weight_value)), None)
    for num_rows in (1, 14):
        got = int8_ops.linear(torch.full((num_rows, k), float(x_value)), layer)
        assert (got == k * x_value * weight_value).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_weights_alone_are_off_by_half_a_step_at_most(n, k):
    """Products with the rounded weights have only the rounding error of fp32."""
    ops, x, (weight, bias) = make_int8_weights_ops(), normal(40, k).double(), make_layer(n, k)
    scales = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scales).round().double() * scales.double()
    error = (ops.linear(x.float(), ops.pack_linear(weight, bias)) - (x @ rounded.T + bias)).abs()
    magnitudes = x.abs() @ rounded.abs().T + bias.abs()
    assert (error <= 4 * math.sqrt(k + 2) * 2**-24 * magnitudes).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_errors_are_those_of_quantisation(int8_ops, n, k):
    """Each weight and each activation is off by half a step at most, steps being 1/127 of the largest in the row."""
    x, (weight, bias) = normal(40, k).double(), make_layer(n, k)
    weight = weight.double()
    got = int8_ops.linear(x.float(), int8_ops.pack_linear(weight.float(), bias))
    half_x, half_weight = (rows.abs().amax(1, keepdim=True) / 254 for rows in (x, weight))
    bound = half_x * weight.abs().sum(1) + x.abs().sum(1, keepdim=True) * half_weight.T + k * half_x * half_weight.T
    error = (got - (x @ weight.T + bias)).abs()
    assert (error <= bound * 1.001 + 1e-5).all()
    if n * k > 1000:  # not all of them conspire
        assert error.square().mean().sqrt() < 0.02


def test_int8_rows_of_zeros_and_of_tiny_and_huge_values(int8_ops):
    weight, bias = make_layer(45, 67)
    weight[7] = 0
    layer = int8_ops.pack_linear(weight, bias)
    assert_same_bits(int8_ops.linear(torch.zeros(3, 67), layer), bias.expand(3, 45))
    x = normal(3, 67)
    assert_same_bits(int8_ops.linear(x, layer)[:, 7], bias[7].expand(3))
    plain = int8_ops.pack_linear(weight, None)
    huge = 2.0**120
    torch.testing.assert_close(int8_ops.linear(x * huge, plain), int8_ops.linear(x, plain) * huge)
    for scale in (2.0**-100, 2.0**-126, 2.0**-140):  # the last are below the least normal number
        torch.testing.assert_close(
            int8_ops.linear(x * scale, plain), int8_ops.linear(x, plain) * scale, rtol=1e-2, atol=2.0**-95
        )


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_8_bit_weights_are_packed_dequantized(quantization):
    ops, x = cpu_ops(quantization=quantization), normal(5, 31)
    values, scales, bias = normal(7, 31).to(torch.float8_e4m3fn), torch.rand(7, 1), normal(7)
    got = ops.linear(x, ops.pack_quantized(values, scales, bias, torch.float32))
    assert torch.equal(got, ops.linear(x, ops.pack_linear(values.float() * scales, bias)))


GROUPED_SHAPES = [(5, 8, 8), (33, 64, 16), (97, 256, 32), (2062, 384, 128), (64, 72, 72)]  # N, K, inputs of a group


def make_grouped(n, k, group_size, num_bits, *, zero_point=None):
    """Makes integer weights; zero points are random and no integers, unless one is given."""
    generator = torch.Generator().manual_seed(n)
    values = torch.randint(0, 2**num_bits, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n, k // group_size, generator=generator) * k**-0.5
    zeros = torch.rand(n, k // group_size, generator=generator) * 2**num_bits if zero_point is None else zero_point
    return GroupedWeights(values, scales, -scales * zeros, num_bits)


@pytest.mark.sampled
@pytest.mark.parametrize("num_bits", [4, 5, 6, 8])
@pytest.mark.parametrize(("n", "k", "group_size"), GROUPED_SHAPES)
def test_grouped_weights_give_the_bits_of_their_dequantized_values(n, k, group_size, num_bits):
    ops = cpu_ops()
    weights, bias = make_grouped(n, k, group_size, num_bits), normal(n, seed=2)
    factors, offsets = (numbers.repeat_interleave(group_size, dim=1) for numbers in (weights.scales, weights.offsets))
    for index in range(5):  # exact in rational numbers, rounded once
        row = zip(weights.values[index].tolist(), factors[index].tolist(), offsets[index].tolist(), strict=True)
        exact = [Fraction(value) * Fraction(factor) + Fraction(offset) for value, factor, offset in row]
        assert weights.dequantized(torch.float32)[index].tolist() == [float(np.float32(float(e))) for e in exact]
    packed, plain = (
        ops.pack_grouped(weights, bias, torch.float32),
        ops.pack_linear(weights.dequantized(torch.float32), bias),
    )
    padded = n + -n % 32
    fills = {4: 8, 5: 32, 6: 16, 8: 8}  # inputs whose bits above four fill a word, beside a word of eight
    stored = next(bits for bits, num_inputs in fills.items() if bits >= num_bits and k % num_inputs == 0)
    assert packed.weight.nbytes == padded * k * stored // 8
    for num_rows in (1, 2, 7, 13, 129):
        x = normal(num_rows, k, seed=num_rows)
        assert torch.equal(ops.linear(x, packed), ops.linear(x, plain))


@pytest.mark.parametrize("num_rows", [1, 2, 13])
def test_grouped_weights_multiply_inputs_in_their_order(num_rows):
    """A single row must be reordered too, which a layer without an order takes where it is."""
    ops, order = cpu_ops(), torch.randperm(64, generator=torch.Generator().manual_seed(3))
    weights, x = make_grouped(33, 64, 16, 4), normal(num_rows, 64)
    got = ops.linear(x, ops.pack_grouped(weights._replace(input_order=order), None, torch.float32))
    assert torch.equal(got, ops.linear(x[:, order].contiguous(), ops.pack_grouped(weights, None, torch.float32)))


@pytest.mark.parametrize(("n", "k"), [(5, 32), (33, 64), (97, 256), (2062, 384)])
def test_weights_in_mxfp4_give_the_bits_of_their_dequantized_values(n, k):
    """All codes, and scales from the smallest to the largest, beside those of usual weights."""
    ops, generator = cpu_ops(), torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(115, 127, (n, k // 32), generator=generator, dtype=torch.uint8)
    exponents[0], exponents[1], exponents[2] = 0, 1, 235
    weights, bias = MicroscaledWeights(codes, exponents), normal(n, seed=2)
    dequantized = weights.dequantized(torch.float32)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in range(5):
        halves = [code for byte in codes[row].tolist() for code in (byte & 15, byte >> 4)]
        assert dequantized[row].tolist() == [
            (-1) ** (code >> 3) * e2m1[code & 7] * 2.0 ** (int(exponents[row, place // 32]) - 127)
            for place, code in enumerate(halves)
        ]
    packed, plain = ops.pack_microscaled(weights, bias, torch.float32), ops.pack_linear(dequantized, bias)
    assert packed.weight.nbytes + packed.codes.nbytes == (n + -n % 32) * (k // 2 + k // 32)
    for num_rows in (1, 2, 7, 13, 129):
        x = normal(num_rows, k, seed=num_rows)
        assert torch.equal(ops.linear(x, packed), ops.linear(x, plain))


def test_with_int8_requested_weights_in_mxfp4_are_quantised_again(int8_ops):
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    weights = MicroscaledWeights(codes, torch.full((8, 2), 120, dtype=torch.uint8))
    packed = int8_ops.pack_microscaled(weights, None, torch.float32)
    expected = int8_ops.pack_linear(weights.dequantized(torch.float32), None)
    assert packed.kind is expected.kind
    assert torch.equal(packed.weight, expected.weight)


def e4m3_value(code):
    """Returns the value of a byte of E4M3 below 127 (arXiv:2209.05433, table 1)."""
    exponent, mantissa = code >> 3, code & 7
    return 2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)


def make_nvfp4(n, k):
    """Makes weights with all codes, in which scales of groups take all finite values without a sign."""
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scales = (torch.arange(n * k // 16) % 127).to(torch.uint8).view(n, -1).view(torch.float8_e4m3fn)
    return NvFp4Weights(codes, scales, torch.rand(n, generator=generator) * 0.01)


@pytest.mark.parametrize(("n", "k"), [(5, 16), (33, 48), (97, 256), (2062, 384)])
def test_weights_in_nvfp4_give_the_bits_of_their_dequantized_values(n, k):
    """Also as integers, which other families multiply."""
    ops, weights, bias = cpu_ops(), make_nvfp4(n, k), normal(n, seed=2)
    dequantized, e2m1 = weights.dequantized(torch.float32), [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in range(5):
        halves = [code for byte in weights.codes[row].tolist() for code in (byte & 15, byte >> 4)]
        groups = [
            np.float32(e4m3_value(code)) * np.float32(weights.row_scales[row])
            for code in weights.scales.view(torch.uint8)[row].tolist()
        ]
        assert dequantized[row].tolist() == [
            np.float32((-1) ** (code >> 3) * e2m1[code & 7]) * groups[place // 16] for place, code in enumerate(halves)
        ]
    assert torch.equal(weights.grouped().dequantized(torch.float32), dequantized)
    packed, plain = ops.pack_fp4(weights, bias, torch.float32), ops.pack_linear(dequantized, bias)
    assert packed.weight.nbytes + packed.codes.nbytes + packed.scales.nbytes == (n + -n % 32) * (k // 2 + k // 16 + 4)
    for num_rows in (1, 2, 7, 13, 129):
        x = normal(num_rows, k, seed=num_rows)
        assert torch.equal(ops.linear(x, packed), ops.linear(x, plain))


def test_with_int8_requested_weights_in_nvfp4_are_quantised_again(int8_ops):
    weights = make_nvfp4(33, 64)
    packed = int8_ops.pack_fp4(weights, None, torch.bfloat16)
    expected = int8_ops.pack_linear(weights.dequantized(torch.float32), None)
    assert packed.kind is expected.kind
    assert torch.equal(packed.weight, expected.weight)
    assert torch.equal(packed.scales, expected.scales)


def test_int8_weights_of_a_checkpoint_are_multiplied_as_they_are():
    """With inputs in fp32, or in int8 where the checkpoint or the flag asks for it; either way without new rounding."""
    n, k = 211, 67
    weights = make_grouped(n, k, k, 8, zero_point=128)
    values, x = weights.values.double() - 128, normal(13, k)
    exact = x.double() @ (values * weights.scales.double()).T
    got = cpu_ops().linear(x, cpu_ops().pack_grouped(weights, None, torch.float32))
    magnitudes = x.double().abs() @ (values.abs() * weights.scales.double()).T
    assert ((got - exact).abs() <= 4 * math.sqrt(k) * 2**-24 * magnitudes).all()
    for ops, stored in ((cpu_ops(), weights._replace(quantizes_inputs=True)), (cpu_ops(quantization="int8"), weights)):
        packed = ops.pack_grouped(stored, None, torch.float32)
        assert packed.kind in (Kind.INT8, Kind.INT8_WEIGHTS)
        assert torch.equal(packed.scales[:n], weights.scales[:, 0])
        largest = x.abs().amax(dim=1, keepdim=True)
        step = largest / 127 if packed.kind is Kind.INT8 else torch.zeros(len(x), 1)
        error = (ops.linear(x, packed) - exact).abs()
        rounding = step.double() / 2 * (values.abs() * weights.scales.double()).sum(dim=1)
        assert (error <= 1.01 * rounding + 4 * math.sqrt(k) * 2**-24 * magnitudes).all()
