"""Rows of tables, plain or packed for the output head, have the bits of the numbers that the table stands for."""

import pytest
import torch

from kernels.families import cpu_ops
from kernels.grouped_weights import GroupedWeights
from tests.support.kernels.batches import assert_same_bits

OPS = cpu_ops()
SIZES = [1, 5, 31, 32, 33, 129]  # with one thread, rows are divided into at most 16 items


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("n", [1, 33, 256])
def test_rows_are_copied(num_tokens, n):
    table, indices = torch.randn(50, n), torch.randint(0, 50, (num_tokens,))
    table[int(indices[0])] = torch.nan
    assert_same_bits(OPS.gather_rows(table, indices), table[indices])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 33, 256])
def test_rows_of_two_bytes_are_widened(dtype, n):
    table, indices = torch.randn(50, n).to(dtype), torch.randint(0, 50, (33,))
    assert_same_bits(OPS.gather_rows(table, indices), table[indices].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_rows_are_gathered_from_a_tied_head(dtype, quantization):
    """From its panels, exactly; of a head in int8 the table itself stays."""
    ops, table = cpu_ops(quantization=quantization), torch.randn(50, 33).to(dtype)
    rows, head = ops.pack_tied(table, dtype)
    assert (rows is head) == (quantization is None)
    indices = torch.arange(50).flip(0)
    assert_same_bits(ops.gather_rows(rows, indices), table[indices].float())
    x = torch.randn(3, 33)
    assert_same_bits(ops.linear(x, head), ops.linear(x, ops.pack_linear(table, None, for_logits=True)))


def grouped(num_bits, group_size):
    """50 rows of 96 integers, with offsets that are no multiples of the scales."""
    shape = (50, 96 // group_size)
    values = torch.randint(0, 2**num_bits, (50, 96), dtype=torch.uint8)
    return GroupedWeights(values, torch.randn(shape), torch.randn(shape), num_bits)


@pytest.mark.parametrize("num_bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [16, 32, 96])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_rows_of_integers_are_their_numbers_rounded_once(num_bits, group_size, quantization):
    ops, weights, indices = cpu_ops(quantization=quantization), grouped(num_bits, group_size), torch.arange(50).flip(0)
    expected = weights.dequantized(torch.float32)[indices]
    assert_same_bits(ops.gather_rows(ops.pack_table(weights, torch.float32), indices), expected)
    rows, head = ops.pack_tied(weights, torch.float32)
    assert_same_bits(ops.gather_rows(rows, indices), expected)
    assert rows is head
    x = torch.randn(3, 96)
    assert_same_bits(ops.linear(x, head), ops.linear(x, ops.pack_grouped(weights, None, torch.float32)))


def test_rows_of_int8_with_a_scale_per_row_are_refused():
    weights = cpu_ops(quantization="int8").pack_linear(torch.randn(32, 16), None)
    with pytest.raises(ValueError, match=r"rows of weights of kind INT8.* cannot be gathered"):
        OPS.gather_rows(weights, torch.tensor([0]))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_table_of_int8_with_a_scale_per_row_is_dequantized(quantization):
    scales = torch.rand(50, 1)
    weights = GroupedWeights(torch.randint(0, 256, (50, 32), dtype=torch.uint8), scales, -128 * scales, 8)
    rows, _ = cpu_ops(quantization=quantization).pack_tied(weights, torch.float32)
    assert_same_bits(OPS.gather_rows(rows, torch.arange(50)), weights.dequantized(torch.float32))


def test_indices_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match=r"indices is int32 on cpu with strides .*, CPU operations take int64"):
        OPS.gather_rows(torch.randn(4, 8), torch.tensor([1, 2], dtype=torch.int32))
