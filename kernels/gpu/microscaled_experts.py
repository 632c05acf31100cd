"""Linear layers of experts in MXFP4 (`kernels.microscaled_weights`), whose codes are widened in registers.

A code is an integer after its value is doubled, exact in 16 bits, and is multiplied as it is; the sum over the 32
inputs of a group is multiplied by their power of two in fp32. No weight is rounded. As in `kernels.gpu.grouped_linear`
the product is transposed, because the matrix instructions of sm_90 take only their first operand from registers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import dot
from kernels.gpu.tile_order import tile_of_program
from kernels.microscaled_weights import MicroscaledWeights
from kernels.scale_groups import MXFP4_GROUP_SIZE

STEP = 2 * MXFP4_GROUP_SIZE
"""Inputs of a step: the groups in the low and in the high halves of its bytes."""

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class MicroscaledLinear:
    """Weights of one expert's layer.

    Attributes:
        weight: [out, 32 * steps] uint8: a byte has input j of a step in its low half, and input j + 32 in the other.
        scales: [2 * steps, out] uint8, exponents. The last group may be one of zeros.
        bias: [out] in the model's dtype.
        dtype: of the model and of results.
        in_features: width of the input.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    in_features: int


def pack_microscaled(weights: MicroscaledWeights, bias: torch.Tensor | None, dtype: torch.dtype) -> MicroscaledLinear:
    """Makes weights of an expert ready for `microscaled_product_kernel`.

    Args:
        weights: the matrix.
        bias: [out], dtype.
        dtype: of the model.
    """
    num_out, num_missing = len(weights.codes), -weights.in_features % STEP
    codes = torch.nn.functional.pad(weights.codes, (0, num_missing // 2))
    exponents = torch.nn.functional.pad(weights.exponents, (0, num_missing // MXFP4_GROUP_SIZE))
    low, high = torch.stack((codes & 15, codes >> 4), dim=-1).view(num_out, -1, 2, MXFP4_GROUP_SIZE).unbind(2)
    packed = (low | high << 4).view(num_out, -1)
    return MicroscaledLinear(packed, exponents.t().contiguous(), bias, dtype, weights.in_features)


@triton.jit(do_not_specialize=["num_tiles"])
def microscaled_product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    pairs_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    """Writes BLOCK_N columns of the pairs of one tile to out [pairs, NUM_OUT]; see `kernels.gpu.experts`."""
    STEPS: tl.constexpr = (NUM_IN + 2 * GROUP_SIZE - 1) // (2 * GROUP_SIZE)
    row_tile, column_tile = tile_of_program(num_tiles, NUM_OUT, 1, BLOCK_N)
    tile_ptr = tiles_ptr + 3 * row_tile
    expert = tl.load(tile_ptr).to(tl.int64)
    if expert >= 0:
        indices = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
        is_pair = indices < tl.load(tile_ptr + 2)
        pairs = tl.load(pairs_ptr + indices, mask=is_pair, other=0).to(tl.int64)
        columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        columns_mask = columns < NUM_OUT
        inputs = tl.arange(0, GROUP_SIZE)
        x_ptrs = x_ptr + (pairs // PAIRS_PER_ROW)[None, :] * NUM_IN + inputs[:, None]
        weight_ptrs = weight_ptr + (expert * NUM_OUT + columns)[:, None] * (STEPS * GROUP_SIZE) + inputs[None, :]
        scale_ptrs = scales_ptr + expert * (2 * STEPS * NUM_OUT) + columns

        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in range(STEPS):
            cells = tl.load(weight_ptrs + step * GROUP_SIZE, mask=columns_mask[:, None], other=0)
            x = tl.load(x_ptrs + 2 * step * GROUP_SIZE, mask=is_pair[None, :], other=0.0)
            acc = _add_group(acc, cells & 15, x, scale_ptrs + 2 * step * NUM_OUT, columns_mask)
            x_mask = is_pair[None, :]
            if NUM_IN % (2 * GROUP_SIZE):
                x_mask = x_mask & ((2 * step + 1) * GROUP_SIZE < NUM_IN)
            x = tl.load(x_ptrs + (2 * step + 1) * GROUP_SIZE, mask=x_mask, other=0.0)
            acc = _add_group(acc, cells >> 4, x, scale_ptrs + (2 * step + 1) * NUM_OUT, columns_mask)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * NUM_OUT + columns, mask=columns_mask, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        out_ptrs = out_ptr + pairs[None, :] * NUM_OUT + columns[:, None]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_pair[None, :] & columns_mask[:, None])


@triton.jit
def _add_group(acc, codes, x, scale_ptrs, mask):  # type: ignore[no-untyped-def]
    """Returns acc + values of codes [BLOCK_N, 32] @ x * scales of their columns."""
    exponents = tl.load(scale_ptrs, mask=mask, other=1).to(tl.int32)
    # half of 2 ** (exponent - 127), for doubled values; the two least of all, below 2 ** -126, become zero
    scales = (tl.maximum(exponents - 1, 0) << 23).to(tl.float32, bitcast=True)
    magnitudes = (codes & 7).to(tl.int8)
    doubled = magnitudes + tl.where(magnitudes > 4, magnitudes - 4, 0) + tl.where(magnitudes > 6, 2, 0)
    doubled = tl.where(codes > 7, -doubled, doubled).to(tl.int8)
    if _IS_INTERPRETED:  # Triton's interpreter would take the integers for bits of bfloat16
        doubled = doubled.to(tl.float32)
    product = dot(doubled.to(x.dtype), x, tl.zeros(acc.shape, tl.float32))
    return acc + product * scales[:, None]
