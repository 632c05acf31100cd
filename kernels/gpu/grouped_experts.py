"""Products of each expert's tokens by weights in integers of 4 or 8 bits; see `kernels.gpu.grouped_linear`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.grouped_linear import GroupedLinear, add_step
from kernels.gpu.tile_order import tile_of_program


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """What one layer of all experts has besides integers and scales; attributes are those of `GroupedLinear`.

    Attributes:
        offsets: [experts, groups, out] fp32.
        input_orders: [experts, in] int32; None: inputs are in their order.
    """

    offsets: torch.Tensor
    num_bits: int
    group_size: int
    span: int
    input_orders: torch.Tensor | None

    @property
    def inputs_per_step(self) -> int:
        """Inputs that a tile loads together."""
        return self.span * 8 // self.num_bits


def stack_groups(layers: Sequence[GroupedLinear]) -> ExpertGroups:
    """Copies what experts of one form have; those with inputs in their order may be among others."""
    first = layers[0]
    orders = [layer.input_order for layer in layers]
    input_orders = None
    if any(order is not None for order in orders):
        in_order = torch.arange(first.in_features, device=first.weight.device)
        input_orders = torch.stack([in_order if order is None else order for order in orders]).to(torch.int32)
    offsets = torch.stack([layer.offsets for layer in layers])
    return ExpertGroups(offsets, first.num_bits, first.group_size, first.span, input_orders)


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_expert_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    orders_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    pairs_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ORDERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes BLOCK_N columns of the pairs of one tile to out [pairs, NUM_OUT]; see `kernels.gpu.experts`."""
    row_tile, column_tile = tile_of_program(num_tiles, NUM_OUT, 1, BLOCK_N)
    tile_ptr = tiles_ptr + 3 * row_tile
    expert = tl.load(tile_ptr).to(tl.int64)
    if expert >= 0:
        indices = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
        is_pair = indices < tl.load(tile_ptr + 2)
        pairs = tl.load(pairs_ptr + indices, mask=is_pair, other=0).to(tl.int64)
        columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        columns_mask = columns < NUM_OUT
        x_ptrs = x_ptr + (pairs // PAIRS_PER_ROW)[None, :] * NUM_IN
        order_ptr = orders_ptr
        if HAS_ORDERS:
            order_ptr += expert * NUM_IN
        weight_ptrs = weight_ptr + (expert * NUM_OUT + columns)[:, None] * (NUM_IN * NUM_BITS // 8)
        first_scale = expert * (NUM_IN // GROUP_SIZE * NUM_OUT) + columns

        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for first in range(0, NUM_IN, BLOCK_K):
            acc = add_step(
                acc,
                first,
                x_ptrs,
                order_ptr,
                weight_ptrs,
                scales_ptr + first_scale,
                offsets_ptr + first_scale,
                is_pair[None, :],
                columns_mask,
                NUM_OUT,
                NUM_BITS,
                GROUP_SIZE,
                BLOCK_K,
                HAS_ORDERS,
            )
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * NUM_OUT + columns, mask=columns_mask, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        out_ptrs = out_ptr + pairs[None, :] * NUM_OUT + columns[:, None]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_pair[None, :] & columns_mask[:, None])
