"""Linear layers on a GPU whose weights are integers of 4 or 8 bits, with a scale and an offset per group of inputs.

Integers are exact in 16 bits, so they are multiplied as they are. The sum over some inputs of one
group is multiplied by the scale in fp32, and the sum of these inputs by the offset. No weight is rounded.

The product is transposed, weights by inputs: they are widened in registers, and the matrix instructions of sm_90 take
only their first operand from there. Few rows then use these instructions too, whose first operand has 64 rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import dot
from kernels.gpu.tile_order import tile_of_program
from kernels.grouped_weights import GroupedWeights

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_SPANS = {4: (32, 16), 8: (64, 32, 16)}
"""Inputs that one product of a tile takes, by preference; a matrix instruction takes 16. In 4 bits a step has two."""


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """Weights of one layer; groups are as in `GroupedWeights`.

    Attributes:
        weight: 8 bits [out, in] int8; 4 bits [out, in / 2] uint8: a byte has input j of a block of 2 * span inputs in
            its low half, and input j + span in the other.
        scales, offsets: [groups, out] fp32.
        bias: [out] in the model's dtype.
        dtype: of the model and of results.
        span: inputs that one product of a tile takes: they lie in one group.
        input_order: [in] int64 of inputs; None: their order.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    num_bits: int
    span: int
    input_order: torch.Tensor | None = None

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.weight.shape[1] * 8 // self.num_bits

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.weight.shape[0]

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.in_features // self.scales.shape[0]

    @property
    def inputs_per_step(self) -> int:
        """Inputs that a tile loads together."""
        return self.span * 8 // self.num_bits


def grouped_span(num_in: int, group_size: int, num_bits: int) -> int | None:
    """Returns the inputs that one product of a tile takes; None if there is no product for such groups."""
    fits = [span for span in _SPANS[num_bits] if group_size % span == 0 and num_in % (span * 8 // num_bits) == 0]
    return fits[0] if fits else None


def pack_grouped(weights: GroupedWeights, bias: torch.Tensor | None, dtype: torch.dtype, span: int) -> GroupedLinear:
    """Makes a checkpoint's integers ready for `tiled_linear`.

    Args:
        weights: the layer.
        bias: [out], dtype.
        dtype: of the model.
        span: result of `grouped_span`.
    """
    values, offsets = weights.values, weights.offsets
    if weights.num_bits == 4:
        low, high = values.view(len(values), -1, 2, span).unbind(2)
        packed = (low | high << 4).reshape(len(values), -1)
    else:  # signed, so that magnitudes are smaller
        packed, offsets = (values ^ 128).view(torch.int8), offsets + 128 * weights.scales
    scales, offsets = weights.scales.t().contiguous(), offsets.t().contiguous()
    return GroupedLinear(packed, scales, offsets, bias, dtype, weights.num_bits, span, weights.input_order)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    offsets_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SPLIT_STEPS: tl.constexpr,
    SPLITS_PER_PROGRAM: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes a tile of the sum of SPLITS_PER_PROGRAM parts to out [programs of parts, num_rows, NUM_OUT].

    The arguments are those of `tiled_linear`'s kernel, with offsets instead of scales of rows.
    """
    row_tile, column_tile = tile_of_program(num_rows, NUM_OUT, BLOCK_M, BLOCK_N)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_mask = (rows < num_rows)[None, :]
    columns_mask = columns < NUM_OUT
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * NUM_IN
    weight_ptrs = weight_ptr + columns.to(tl.int64)[:, None] * (NUM_IN * NUM_BITS // 8)
    scale_ptrs, offset_ptrs = scales_ptr + columns, offsets_ptr + columns
    part = tl.program_id(1)

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for split in range(part * SPLITS_PER_PROGRAM, (part + 1) * SPLITS_PER_PROGRAM):
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in range(SPLIT_STEPS):
            first = (split * SPLIT_STEPS + step) * BLOCK_K
            x_mask = rows_mask
            if not IS_EVEN:  # steps beyond the inputs add zeros
                x_mask = rows_mask & (first < NUM_IN)
                first = tl.minimum(first, NUM_IN - BLOCK_K)
            acc = add_step(
                acc,
                first,
                x_ptrs,
                x_ptr,
                weight_ptrs,
                scale_ptrs,
                offset_ptrs,
                x_mask,
                columns_mask,
                NUM_OUT,
                NUM_BITS,
                GROUP_SIZE,
                BLOCK_K,
                False,
            )
        total += acc
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=columns_mask, other=0.0).to(tl.float32)[:, None]
    out_rows = part.to(tl.int64) * num_rows + rows
    out_ptrs = out_ptr + out_rows[None, :] * NUM_OUT + columns[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=rows_mask & columns_mask[:, None])


@triton.jit
def add_step(  # type: ignore[no-untyped-def]
    acc,
    first,
    x_ptrs,
    order_ptr,
    weight_ptrs,
    scale_ptrs,
    offset_ptrs,
    x_mask,
    columns_mask,
    NUM_OUT: tl.constexpr,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Returns acc [columns, rows] and the product of BLOCK_K inputs of these rows by the weights of these columns.

    Args:
        acc: sums in fp32.
        first: first of the inputs.
        x_ptrs: [1, rows], of rows of inputs.
        order_ptr: [inputs], with HAS_ORDER: input i of the weights is input order[i] of a row.
        weight_ptrs: [columns, 1], of rows of weights.
        scale_ptrs, offset_ptrs: [columns], of those of the first group.
        x_mask: [1, rows], whether rows are read.
        columns_mask: [columns].
    """
    SPAN: tl.constexpr = BLOCK_K * NUM_BITS // 8
    inputs = tl.arange(0, SPAN)
    cells = tl.load(weight_ptrs + (first * NUM_BITS // 8 + inputs)[None, :], mask=columns_mask[:, None], other=0)
    x = _load_inputs(x_ptrs, order_ptr, first + inputs, x_mask, HAS_ORDER)
    sums = tl.sum(x.to(tl.float32), 0)
    if NUM_BITS == 8:
        product = _product(cells, x, tl.zeros(acc.shape, tl.float32))
    else:
        product = _product((cells & 15).to(tl.int8), x, tl.zeros(acc.shape, tl.float32))
        x = _load_inputs(x_ptrs, order_ptr, first + SPAN + inputs, x_mask, HAS_ORDER)
        values = (cells >> 4).to(tl.int8)
        if GROUP_SIZE % BLOCK_K == 0:
            product = _product(values, x, product)
            sums += tl.sum(x.to(tl.float32), 0)
        else:  # the second half of the step may lie in another group
            group = first // GROUP_SIZE * NUM_OUT
            acc = _add_group(acc, product, sums, scale_ptrs + group, offset_ptrs + group, columns_mask)
            product = _product(values, x, tl.zeros(acc.shape, tl.float32))
            sums = tl.sum(x.to(tl.float32), 0)
            first += SPAN
    group = first // GROUP_SIZE * NUM_OUT
    return _add_group(acc, product, sums, scale_ptrs + group, offset_ptrs + group, columns_mask)


@triton.jit
def _load_inputs(x_ptrs, order_ptr, inputs, mask, HAS_ORDER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns these inputs of the rows, [inputs, rows]."""
    if HAS_ORDER:
        inputs = tl.load(order_ptr + inputs)
    return tl.load(x_ptrs + inputs[:, None], mask=mask, other=0.0)


@triton.jit
def _product(values, x, acc):  # type: ignore[no-untyped-def]
    """Returns acc + values @ x, of integers that are exact in the dtype of x."""
    if _IS_INTERPRETED:  # Triton's interpreter would take the integers for bits of bfloat16
        values = values.to(tl.float32)
    return dot(values.to(x.dtype), x, acc)


@triton.jit
def _add_group(acc, product, sums, scale_ptrs, offset_ptrs, mask):  # type: ignore[no-untyped-def]
    """Returns acc + scales * product + offsets * sums of the inputs, which lie in one group."""
    scales = tl.load(scale_ptrs, mask=mask, other=0.0)
    offsets = tl.load(offset_ptrs, mask=mask, other=0.0)
    return acc + product * scales[:, None] + sums[None, :] * offsets[:, None]
