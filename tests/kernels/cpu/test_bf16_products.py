"""Products of inputs and weights in bf16: exactly those of the instruction's definition, and near those of fp64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.ops import CpuOps
from kernels.cpu.packed_linear import Kind
from kernels.cpu.two_bytes import round_row_to_bf16
from kernels.families import cpu_ops
from kernels.interface import Routing
from tests.support.kernels.batches import assert_same_bits, normal

SHAPES = [(1, 1), (5, 3), (31, 7), (33, 64), (64, 33), (100, 130), (211, 66), (97, 1031), (2062, 129)]  # N, K
NUM_ROWS = [1, 2, 5, 6, 7, 12, 13, 25, 129]
LEAST_NORMAL = 2.0**-126

needs_bf16 = pytest.mark.skipif(not cpu_features().bf16, reason="needs AVX512-BF16")


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return cpu_ops(multiplies_in_bf16=True)


def make_layer(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (normal(n, k, seed=1) * k**-0.5).bfloat16(), normal(n, seed=2)


def emulated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Computes x W^T + b as the manual defines VDPBF16PS: of each pair of terms the second is added first.

    A product of two bf16 is exact in fp64; it is added to a sum and rounded once to fp32. Numbers below the least
    normal one count as zeros. The fp64 sum is exact but where the terms differ in size by 2^29 or more; then rounding
    it again to fp32 gives the wrong neighbour only next to a tie, which does not occur among these numbers.
    """

    def flushed(values: Any) -> Any:
        return np.where(np.abs(values) < LEAST_NORMAL, 0.0, values)

    pad = (0, x.shape[1] % 2)
    a, b = (flushed(torch.nn.functional.pad(matrix.double(), pad).numpy()) for matrix in (x.bfloat16(), weight))
    sums = np.broadcast_to(bias.numpy(), (len(x), len(weight))).astype(np.float64)
    for first in range(0, a.shape[1], 2):
        for k in (first + 1, first):
            sums = flushed((sums + a[:, k, None] * b[None, :, k]).astype(np.float32)).astype(np.float64)
    return torch.from_numpy(sums.astype(np.float32))


@needs_bf16
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_have_the_bits_of_the_instruction_at_any_number_of_rows(ops: CpuOps, n: int, k: int) -> None:
    weight, bias = make_layer(n, k)
    layer, x = ops.pack_linear(weight, bias), normal(max(NUM_ROWS), k)
    assert layer.kind is Kind.BF16
    assert layer.weight.nbytes == (n + -n % 32) * (k + k % 2) * 2
    want = emulated(x, weight, bias)
    for num_rows in NUM_ROWS:
        start = (len(x) - num_rows) // 2
        assert_same_bits(ops.linear(x[start : start + num_rows], layer), want[start : start + num_rows])


@needs_bf16
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_errors_are_those_of_rounded_inputs(ops: CpuOps, n: int, k: int) -> None:
    """Each input is off by 2^-8 of it at most, half a unit of its 8 bits; sums of K terms in fp32 as in test_linear."""
    weight, bias = make_layer(n, k)
    x = normal(40, k)
    error = ops.linear(x, ops.pack_linear(weight, bias)).double() - (x.double() @ weight.double().T + bias)
    magnitudes = x.double().abs() @ weight.double().abs().T
    bound = 2**-8 * magnitudes + 4 * math.sqrt(k + 1) * 2**-24 * (1.01 * magnitudes + bias.abs())
    assert (error.abs() <= bound).all()


@needs_bf16
def test_tiny_inputs_count_as_zeros_and_nan_stays_in_its_row(ops: CpuOps) -> None:
    weight, bias = make_layer(33, 8)
    layer, x = ops.pack_linear(weight, bias), normal(3, 8)
    x[0], x[1, 5] = 2.0**-130, math.nan
    got = ops.linear(x, layer)
    assert_same_bits(got[0], bias)
    assert got[1].isnan().all()
    assert_same_bits(got[2], emulated(x[2:], weight, bias)[0])
    assert ops.linear(x[1:2], layer).isnan().all()


@needs_bf16
@pytest.mark.parametrize("num_in", [95, 96])
def test_output_heads_multiply_in_bf16_and_their_rows_are_gathered_exactly(ops: CpuOps, num_in: int) -> None:
    weight, x = make_layer(64, num_in)[0], normal(5, num_in)
    head = ops.pack_linear(weight, None, for_logits=True)
    assert_same_bits(ops.linear(x, head), emulated(x, weight, torch.zeros(64)))
    table, tied = ops.pack_tied(weight, weight.dtype)
    assert table is tied
    assert_same_bits(ops.linear(x, tied), ops.linear(x, head))
    indices = torch.arange(64).flip(0)
    assert_same_bits(ops.gather_rows(table, indices), weight[indices].float())


@needs_bf16
def test_routers_and_weights_of_other_types_stay_exact(ops: CpuOps) -> None:
    weight = make_layer(64, 96)[0]
    for dtype, kind in ((torch.float32, Kind.FP32), (torch.float16, Kind.FP16_WEIGHTS)):
        assert ops.pack_linear(weight.to(dtype), None).kind is kind
    experts = [ops.pack_linear(weight, None)] * 2
    packed = ops.pack_experts(weight[:2], experts, experts, Routing(1, True, "silu_and_mul"))
    assert packed.router.kind is Kind.BF16_WEIGHTS


@needs_bf16
def test_experts_multiply_in_bf16_alone_and_in_a_batch(ops: CpuOps) -> None:
    """With one expert, whose probability is one: the layers one after the other."""
    hidden, inner = 96, 50
    gate_up, down = (ops.pack_linear(make_layer(*shape)[0], None) for shape in ((2 * inner, hidden), (hidden, inner)))
    experts = ops.pack_experts(normal(1, hidden), [gate_up], [down], Routing(1, True, "silu_and_mul"))
    x = normal(13, hidden)
    together = ops.mix_experts(x, experts)
    assert_same_bits(together, ops.linear(ops.gate_and_mul(ops.linear(x, gate_up), "silu_and_mul"), down))
    assert_same_bits(together, torch.cat([ops.mix_experts(row, experts) for row in x.split(1)]))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_without_being_asked_for_nothing_is_rounded(quantization: Any) -> None:
    weight, bias = make_layer(64, 96)
    assert cpu_ops(quantization=quantization).pack_linear(weight, bias).kind is not Kind.BF16


@njit
def _rounded(x: Any, target: int) -> None:
    round_row_to_bf16(x, target)


@pytest.mark.parametrize("length", [1, 2, 17, 32, 131])
def test_rows_are_rounded_as_pytorch_does(length: int) -> None:
    """Ties to even, carries into the exponent and to infinity, subnormal numbers, infinities; NaN stays NaN."""
    bits = np.random.default_rng(length).integers(0, 2**32, (64, length), dtype=np.uint32)
    bits[0], bits[1], bits[2], bits[3] = 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00008001
    bits[4], bits[5], bits[6], bits[7] = 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F800001
    values = bits.view(np.float32)
    expected = torch.nn.functional.pad(torch.from_numpy(values).bfloat16(), (0, length % 2))
    for row, want in zip(values, expected, strict=True):
        target = np.full(length + 1, -1, dtype=np.int32)
        _rounded(row, target.ctypes.data)
        pairs = -(-length // 2)
        got = torch.from_numpy(target[:pairs]).view(torch.bfloat16)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[~got.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))
        assert (target[pairs:] == -1).all()
