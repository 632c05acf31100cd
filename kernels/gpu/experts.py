"""Mixtures of experts (arXiv:2101.03961, section 2) on a GPU: products of each expert's tokens by its weights.

The tokens of all experts are one list, sorted by expert and divided into tiles of one expert each (as the block-sparse
products of MegaBlocks, arXiv:2211.15841, without padding in memory). A tile gathers its rows of inputs by their
numbers and writes its results in the place of the pair of token and expert, so that nothing is moved in between. Each
element is summed over the inputs in one order, whatever the other tokens are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import dot
from kernels.gpu.block_scales import BlockScaledLinear
from kernels.gpu.expert_rows import ExpertRows, expert_rows, rows_of_choice
from kernels.gpu.float8 import widen_float8
from kernels.gpu.grouped_experts import ExpertGroups, grouped_expert_kernel, stack_groups
from kernels.gpu.grouped_linear import GroupedLinear
from kernels.gpu.launch import BoundKernel, is_compile_only
from kernels.gpu.linear import PackedLinear
from kernels.gpu.microscaled_experts import STEP, MicroscaledLinear, microscaled_product_kernel
from kernels.gpu.quantize import QuantizedRows, rows_in_8_bits
from kernels.gpu.rows import check_rows
from kernels.gpu.targets import Target
from kernels.gpu.tile_order import tile_of_program
from kernels.gpu.tiles import ProductTile, block_product_tiles, column_tile, grouped_product_tiles
from kernels.interface import ExpertChoice, Routing
from kernels.scale_groups import FP8_BLOCK_SIZE, MXFP4_GROUP_SIZE

Rows = torch.Tensor | QuantizedRows
PackedExpert = PackedLinear | BlockScaledLinear | GroupedLinear | MicroscaledLinear

_Constants = tuple[tuple[str, int], ...]
"""Names and values of constexpr parameters of a kernel that those of other formats do not have."""


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One linear layer of all experts.

    Attributes:
        weight: [experts, out, in] in the model's dtype, or in 8 bits: uint8 where the target has no 8-bit float. In
            MXFP4 and in integers those of `MicroscaledLinear` and of `GroupedLinear`.
        scales: of 8-bit weights: [experts, out] or, per block, [experts, out / 128, in / 128], fp32. In MXFP4 and in
            integers as the weights.
        dtype: of the model, of the bias and of results.
        num_in: inputs.
        bias: [experts, out].
        groups: of integers.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None
    dtype: torch.dtype
    num_in: int
    bias: torch.Tensor | None = None
    groups: ExpertGroups | None = None

    @property
    def is_microscaled(self) -> bool:
        """Whether weights are in MXFP4."""
        return self.scales is not None and self.scales.dtype is torch.uint8

    @property
    def has_block_scales(self) -> bool:
        """Whether weights in 8-bit floats have scales per block."""
        is_float = self.groups is None and not self.is_microscaled
        return is_float and self.scales is not None and self.scales.ndim == 3

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype in which inputs are multiplied."""
        is_widened = self.scales is None or self.groups is not None or self.weight.dtype is torch.uint8
        return self.dtype if is_widened else self.weight.dtype


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights of a mixture: the router [experts, in], if the caller does not choose, and both layers of the experts."""

    router: PackedLinear | None
    gate_up: ExpertLinear
    down: ExpertLinear
    routing: Routing


def pack_experts(
    router: torch.Tensor | None,
    gate_up: Sequence[PackedExpert],
    down: Sequence[PackedExpert],
    routing: Routing,
    router_bias: torch.Tensor | None = None,
) -> PackedExperts:
    """Copies the experts of a layer into one tensor each.

    Args:
        router: [experts, in] in the model's dtype, which is never quantised; None: the caller chooses.
        gate_up, down: layers of one form and shape.
        routing: how experts are chosen.
        router_bias: [experts] in the model's dtype.
    """
    packed_router = None if router is None else PackedLinear(router, None, router_bias, router.dtype)
    return PackedExperts(packed_router, _stacked(gate_up), _stacked(down), routing)


def _stacked(layers: Sequence[PackedExpert]) -> ExpertLinear:
    weights, scales, biases = [], [], []
    for layer in layers:
        is_transposed = isinstance(layer, PackedLinear) and layer.scales is not None
        weights.append(layer.weight.t() if is_transposed else layer.weight)
        if layer.scales is not None:
            scales.append(layer.scales[0] if is_transposed else layer.scales)
        if layer.bias is not None:
            biases.append(layer.bias)
    grouped = [layer for layer in layers if isinstance(layer, GroupedLinear)]
    return ExpertLinear(
        torch.stack(weights),
        torch.stack(scales) if scales else None,
        layers[0].dtype,
        layers[0].in_features,
        torch.stack(biases) if biases else None,
        stack_groups(grouped) if grouped else None,
    )


def mix_experts(
    x: torch.Tensor,
    experts: PackedExperts,
    *,
    linear: Callable[[torch.Tensor, PackedLinear], torch.Tensor],
    gate: Callable[[torch.Tensor], Rows],
    target: Target,
    batch_invariant: bool,
) -> torch.Tensor:
    """Returns the sum of the results of the experts that the router chooses, [T, out] in the model's dtype.

    Args:
        x: [T, in] in the model's dtype, contiguous.
        experts: weights.
        linear: multiplies by the router.
        gate: the operation between the layers of an expert; may quantise its result.
        target: architecture of the device; decides the tiles.
        batch_invariant: uses the same tile for any number of rows, so that a row has the same bits in any batch.
    Raises: ValueError: the experts have no router, or x is of another form.
    """
    if experts.router is None:
        raise ValueError("the experts have no router")
    check_rows(x=x)
    rows_of = partial(expert_rows, linear(x, experts.router), experts.routing)
    return _mixed(x, experts, rows_of, gate, target, batch_invariant)


def mix_chosen_experts(
    x: torch.Tensor,
    experts: PackedExperts,
    choice: ExpertChoice,
    *,
    gate: Callable[[torch.Tensor], Rows],
    target: Target,
    batch_invariant: bool,
) -> torch.Tensor:
    """Returns the sum of the results of the experts that the caller has chosen; arguments as of `mix_experts`.

    Raises: ValueError: the choice is not of the rows of x, or not of top_k experts each, or x is of another form.
    """
    check_rows(x=x)
    choice.check(x, experts.routing.top_k)
    rows_of = partial(rows_of_choice, choice, experts.gate_up.weight.shape[0])
    return _mixed(x, experts, rows_of, gate, target, batch_invariant)


def _mixed(
    x: torch.Tensor,
    experts: PackedExperts,
    rows_of: Callable[[int], ExpertRows],
    gate: Callable[[torch.Tensor], Rows],
    target: Target,
    batch_invariant: bool,
) -> torch.Tensor:
    """Computes the mixture; rows_of makes the work list in tiles of up to block_m pairs."""
    num_experts, top_k = experts.gate_up.weight.shape[0], experts.routing.top_k
    tiles = list(zip(_tiles(experts.gate_up, target), _tiles(experts.down, target), strict=True))
    if batch_invariant:
        tiles = [tiles[len(tiles) // 2]]
    elif not is_compile_only():
        mean_rows = -(-x.shape[0] * top_k // num_experts)
        tiles = [next((pair for pair in tiles if mean_rows <= pair[0].block_m), tiles[-1])]
    for first, second in tiles:
        rows = rows_of(first.block_m)
        gate_up = _product(x, experts.gate_up, rows, first, top_k)
        if second.block_m != first.block_m:  # in fp32, if only one of the layers is in integers
            rows = rows_of(second.block_m)
        out = _product(gate(gate_up), experts.down, rows, second, 1)
    return _sum_of_experts(out, rows.weights)


def _tiles(layer: ExpertLinear, target: Target) -> tuple[ProductTile, ...]:
    """Returns tiles by rising block_m, as many for each form."""
    if layer.groups is not None:
        return grouped_product_tiles(target, layer.dtype.itemsize, layer.groups.inputs_per_step, layer.groups.span)
    if layer.is_microscaled:
        return grouped_product_tiles(target, layer.dtype.itemsize, STEP, MXFP4_GROUP_SIZE)
    return block_product_tiles(target, layer.input_dtype.itemsize)


def _product(x: Rows, layer: ExpertLinear, rows: ExpertRows, tile: ProductTile, pairs_per_row: int) -> torch.Tensor:
    """Multiplies rows by the weights of the experts of their pairs.

    Args:
        x: [pairs / pairs_per_row, in]: row i is of pairs i * pairs_per_row and following.
        layer: weights.
        rows: the work list, of tiles of block_m.
        tile: sizes.
        pairs_per_row: top_k for rows of tokens, 1 for rows of pairs.
    Returns: [pairs, out] in the model's dtype.
    """
    num_in, num_out = layer.num_in, layer.weight.shape[1]
    if layer.input_dtype.itemsize == 1:
        x = rows_in_8_bits(x, layer.input_dtype, FP8_BLOCK_SIZE if layer.has_block_scales else num_in, layer.dtype)
        values, row_scales = x.values, x.scales
    else:
        values = x.dequantized(layer.dtype) if isinstance(x, QuantizedRows) else x
        row_scales = values
    scales, bias = (values if tensor is None else tensor for tensor in (layer.scales, layer.bias))
    constants: _Constants = (("BLOCK_K", tile.block_k),)
    tensors: tuple[torch.Tensor, ...]
    if layer.groups is not None:
        orders = values if layer.groups.input_orders is None else layer.groups.input_orders
        kernel, tensors = grouped_expert_kernel, (values, orders, layer.weight, scales, layer.groups.offsets)
        constants += (
            ("NUM_BITS", layer.groups.num_bits),
            ("GROUP_SIZE", layer.groups.group_size),
            ("HAS_ORDERS", layer.groups.input_orders is not None),
        )
    elif layer.is_microscaled:
        kernel, tensors = microscaled_product_kernel, (values, layer.weight, scales)
        constants = (("GROUP_SIZE", MXFP4_GROUP_SIZE),)
    else:
        kernel, tensors = _expert_product_kernel, (values, row_scales, layer.weight, scales)
        constants += (
            ("SCALE_BLOCK", FP8_BLOCK_SIZE if layer.has_block_scales else 0),
            ("HAS_CHANNEL_SCALES", layer.scales is not None and not layer.has_block_scales),
            ("HAS_ROW_SCALES", row_scales is not values),
        )
    bound, num_column_tiles = _bind(kernel, constants, tile, num_in, num_out, layer.bias is not None, pairs_per_row)
    out = torch.empty(len(rows.pairs), num_out, dtype=layer.dtype, device=values.device)
    num_tiles = rows.tiles.shape[0]
    bound((num_tiles * num_column_tiles,), *tensors, bias, rows.pairs, rows.tiles, out, num_tiles)
    return out


@cache
def _bind(
    kernel: Any,
    constants: _Constants,
    tile: ProductTile,
    num_in: int,
    num_out: int,
    has_bias: bool,
    pairs_per_row: int,
) -> tuple[BoundKernel, int]:
    """Returns the kernel of a layer, and its tiles of columns."""
    bound = BoundKernel(
        kernel,
        NUM_IN=num_in,
        NUM_OUT=num_out,
        HAS_BIAS=has_bias,
        PAIRS_PER_ROW=pairs_per_row,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dict(constants),
    )
    return bound, -(-num_out // tile.block_n)


def _sum_of_experts(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Adds results [T * top_k, n], times weights [T, top_k], of each token in fp32; returns [T, n]."""
    (num_tokens, top_k), n = weights.shape, out.shape[1]
    total = torch.empty(num_tokens, n, dtype=out.dtype, device=out.device)
    kernel, block_m, num_columns = _bind_sum(n, top_k)
    kernel((-(-num_tokens // block_m), num_columns), out, weights, total, num_tokens)
    return total


@cache
def _bind_sum(n: int, top_k: int) -> tuple[BoundKernel, int, int]:
    tile = column_tile(n)
    kernel = BoundKernel(
        _sum_kernel, N=n, TOP_K=top_k, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps
    )
    return kernel, tile.block_m, triton.cdiv(n, tile.block_n)


@triton.jit(do_not_specialize=["num_tiles"])
def _expert_product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    row_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    pairs_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    HAS_CHANNEL_SCALES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes BLOCK_N columns of the pairs of one tile to out [pairs, NUM_OUT].

    SCALE_BLOCK inputs and outputs, a multiple of BLOCK_K and of BLOCK_N, share a scale of 8-bit weights; 0: they do
    not. HAS_CHANNEL_SCALES: each output has one. HAS_ROW_SCALES: x is in 8 bits too, with a scale per row, or per
    SCALE_BLOCK inputs of it.
    """
    row_tile, column_tile = tile_of_program(num_tiles, NUM_OUT, 1, BLOCK_N)
    tile_ptr = tiles_ptr + 3 * row_tile
    expert = tl.load(tile_ptr)
    if expert >= 0:
        indices = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
        is_pair = indices < tl.load(tile_ptr + 2)
        pairs = tl.load(pairs_ptr + indices, mask=is_pair, other=0).to(tl.int64)
        rows = pairs // PAIRS_PER_ROW
        first_column = column_tile * BLOCK_N
        columns = first_column + tl.arange(0, BLOCK_N)
        columns_mask = columns < NUM_OUT
        out_channels = expert.to(tl.int64) * NUM_OUT + columns
        x_ptrs = x_ptr + rows[:, None] * NUM_IN
        weight_ptrs = weight_ptr + out_channels[None, :] * NUM_IN

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first_input in range(0, NUM_IN, BLOCK_K):
            inputs = first_input + tl.arange(0, BLOCK_K)
            x_mask = is_pair[:, None]
            weight_mask = columns_mask[None, :]
            if NUM_IN % BLOCK_K:
                x_mask = x_mask & (inputs < NUM_IN)[None, :]
                weight_mask = weight_mask & (inputs < NUM_IN)[:, None]
            x = tl.load(x_ptrs + inputs[None, :], mask=x_mask, other=0.0)
            weight = tl.load(weight_ptrs + inputs[:, None], mask=weight_mask, other=0.0)
            if SCALE_BLOCK:
                block = first_input // SCALE_BLOCK
                scale_row = expert.to(tl.int64) * (NUM_OUT // SCALE_BLOCK) + first_column // SCALE_BLOCK
                scale = tl.load(scales_ptr + scale_row * (NUM_IN // SCALE_BLOCK) + block)
                if HAS_ROW_SCALES:
                    row_scales_ptrs = row_scales_ptr + rows * (NUM_IN // SCALE_BLOCK) + block
                    factor = tl.load(row_scales_ptrs, mask=is_pair, other=0.0)[:, None] * scale
                else:
                    factor = scale
                    weight = widen_float8(weight, x.dtype)
                acc += dot(x, weight, tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * factor
            else:
                acc = dot(x, weight, acc)
        if HAS_CHANNEL_SCALES:
            acc = acc * tl.load(scales_ptr + out_channels, mask=columns_mask, other=0.0)[None, :]
            acc = acc * tl.load(row_scales_ptr + rows, mask=is_pair, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + out_channels, mask=columns_mask, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + pairs[:, None] * NUM_OUT + columns[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_pair[:, None] & columns_mask[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    weights_ptr,
    total_ptr,
    num_tokens,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (tokens < num_tokens)[:, None] & (columns < N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for place in range(TOP_K):
        pairs = tokens * TOP_K + place
        weights = tl.load(weights_ptr + pairs, mask=tokens < num_tokens, other=0.0)[:, None]
        total += weights * tl.load(out_ptr + pairs[:, None] * N + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(total_ptr + tokens[:, None] * N + columns, total.to(total_ptr.dtype.element_ty), mask=mask)
