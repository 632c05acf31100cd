"""Linear layers in Triton: with a fixed order of summation, for `--batch-invariant`; with 8-bit weights that have
scales per block, or per output channel for few rows; and with integers in groups (`kernels.gpu.grouped_linear`).

The inputs of a layer are divided into parts. Each part is summed tile by tile in fp32, and the sums of the parts are
added in order. A small batch has one program per part, to fill the GPU, and a second kernel adds the sums; in a large
batch one program takes all parts. With `--batch-invariant` the tile is the same too, so that either way each element is
the result of the same sequence of instructions. A vendor's library chooses tiles and splits by the number of rows, and
with them the order of summation (Horace He et al., "Defeating Nondeterminism in LLM Inference", 2025).

With scales per block (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), inputs are quantised with a scale per token and
group of 128, and each product of a tile of inputs is multiplied by both scales before it is added to the sum. GPUs
without 8-bit floats multiply the inputs as they are by the values of the weights, which are exact in 16 bits.
"""

from functools import cache
from typing import Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import dot
from kernels.gpu.block_scales import BlockScaledLinear
from kernels.gpu.float8 import widen_float8
from kernels.gpu.grouped_linear import GroupedLinear, grouped_product_kernel
from kernels.gpu.launch import BoundKernel, is_compile_only
from kernels.gpu.linear import PackedLinear
from kernels.gpu.quantize import QuantizedRows, rows_in_8_bits
from kernels.gpu.rows import check_rows
from kernels.gpu.targets import Target
from kernels.gpu.tile_order import tile_of_program
from kernels.gpu.tiles import (
    ProductTile,
    block_product_tiles,
    grouped_product_tiles,
    max_scaled_rows,
    product_splits,
    product_tile,
    scaled_product_tiles,
)
from kernels.scale_groups import FP8_BLOCK_SIZE

TiledLinear: TypeAlias = PackedLinear | BlockScaledLinear | GroupedLinear
"""Layers that `tiled_linear` computes."""

_ADD_BLOCK = 1024


def tiled_linear(
    x: torch.Tensor | QuantizedRows,
    packed: TiledLinear,
    *,
    target: Target,
    num_processors: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """Returns x [T, in] @ weight [out, in]^T + bias [out], [T, out] in the model's dtype.

    Args:
        x: rows, quantised or not; converted first if they do not match the weights.
        packed: the layer.
        target: architecture of the device; decides the tiles.
        num_processors: multiprocessors of the device; they decide how many programs share the work.
        batch_invariant: uses the same tile for any number of rows, so that a row has the same bits in any batch.
    Raises: ValueError: rows of another width.
    """
    num_rows, num_in = x.values.shape if isinstance(x, QuantizedRows) else x.shape
    if num_in != packed.in_features:
        raise ValueError(f"rows of x have {num_in} values, the layer takes {packed.in_features}")
    rows, row_scales = _rows_for(x, packed)
    num_out = packed.out_features
    out = torch.empty(num_rows, num_out, dtype=packed.dtype, device=rows.device)
    scales = row_scales if packed.scales is None else packed.scales
    bias = out if packed.bias is None else packed.bias
    if isinstance(packed, GroupedLinear):
        form = _Form(groups=(packed.num_bits, packed.group_size))
        tensors = rows, packed.offsets, packed.weight, scales, bias
    else:
        form = _Form(
            scales=None if packed.scales is None else "block" if isinstance(packed, BlockScaledLinear) else "channel",
            has_row_scales=row_scales is not rows,
        )
        tensors = rows, row_scales, packed.weight, scales, bias
    for tile in _tiles(packed, rows.itemsize, target, num_rows, batch_invariant):
        kernel = _bind(tile, num_in, num_out, packed.bias is not None, form, batch_invariant)
        num_tiles = -(-num_rows // tile.block_m) * kernel.num_column_tiles
        if is_compile_only() or kernel.num_splits == 1 or num_tiles >= num_processors:
            kernel.whole((num_tiles, 1), *tensors, out, num_rows)
        if kernel.num_splits > 1 and (is_compile_only() or num_tiles < num_processors):
            parts = torch.empty(kernel.num_splits, num_rows, num_out, dtype=torch.float32, device=rows.device)
            kernel.part((num_tiles, kernel.num_splits), *tensors, parts, num_rows)
            kernel.add((num_rows, -(-num_out // _ADD_BLOCK)), parts, row_scales, scales, bias, out, num_rows)
    return out


def is_tiled(num_rows: int, packed: TiledLinear, target: Target) -> bool:
    """Tells whether `tiled_linear` is the product to use where results may depend on the batch."""
    if not isinstance(packed, PackedLinear):
        return True
    return packed.scales is not None and num_rows <= max_scaled_rows(target)


def _rows_for(x: torch.Tensor | QuantizedRows, packed: TiledLinear) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows that the kernel multiplies with the weights, and their scales: the rows again if they have none."""
    if isinstance(packed, BlockScaledLinear) and packed.weight.dtype is not torch.uint8:
        quantized = rows_in_8_bits(x, packed.weight.dtype, FP8_BLOCK_SIZE, packed.dtype)
        return quantized.values, quantized.scales
    if isinstance(packed, PackedLinear) and packed.scales is not None:
        quantized = rows_in_8_bits(x, packed.weight.dtype, packed.in_features, packed.dtype)
        return quantized.values, quantized.scales
    rows = x.dequantized(packed.dtype) if isinstance(x, QuantizedRows) else x
    if isinstance(packed, GroupedLinear) and packed.input_order is not None:
        rows = rows.index_select(1, packed.input_order)
    check_rows(x=rows)
    return rows, rows


def _tiles(
    packed: TiledLinear, itemsize: int, target: Target, num_rows: int, batch_invariant: bool
) -> tuple[ProductTile, ...]:
    """Returns the tile for a number of rows; all that later calls may use, if kernels are compiled."""
    if isinstance(packed, PackedLinear) and packed.scales is None:
        return (product_tile(target, itemsize),)
    if isinstance(packed, PackedLinear):
        tiles = scaled_product_tiles(target)
    elif isinstance(packed, GroupedLinear):
        tiles = grouped_product_tiles(target, itemsize, packed.inputs_per_step, packed.span)
    else:
        tiles = block_product_tiles(target, itemsize)
    if batch_invariant:
        return (tiles[len(tiles) // 2],)
    if is_compile_only():
        return tiles
    return (next((tile for tile in tiles if num_rows <= tile.block_m), tiles[-1]),)


class _Form(NamedTuple):
    """What distinguishes kernels besides tile and sizes.

    Attributes:
        scales: of weights in 8 bits, per block or per output channel.
        has_row_scales: whether inputs are in 8 bits too.
        groups: bits and group size of integers in groups.
    """

    scales: Literal["block", "channel"] | None = None
    has_row_scales: bool = False
    groups: tuple[int, int] | None = None


class _Kernels(NamedTuple):
    """Kernels of a layer and a tile.

    Attributes:
        whole: sums all inputs, part by part if batch-invariant, and writes the result.
        part: sums one part in each program.
        add: adds the sums of the parts and writes the result.
        num_column_tiles: tiles of a row of the result.
        num_splits: parts of the inputs.
    """

    whole: BoundKernel
    part: BoundKernel
    add: BoundKernel
    num_column_tiles: int
    num_splits: int


@cache
def _bind(
    tile: ProductTile,
    num_in: int,
    num_out: int,
    has_bias: bool,
    form: _Form,
    batch_invariant: bool,
) -> _Kernels:
    num_splits = product_splits(tile, num_in, num_out)
    steps = -(-num_in // (tile.block_k * num_splits))
    has_channel_scales = form.scales == "channel"

    def product(num_parts: int, steps_per_part: int, writes_result: bool) -> BoundKernel:
        options = {
            "SCALE_BLOCK": FP8_BLOCK_SIZE if form.scales == "block" else 0,
            "HAS_CHANNEL_SCALES": has_channel_scales and writes_result,
            "HAS_ROW_SCALES": form.has_row_scales,
        }
        if form.groups is not None:
            options = dict(zip(("NUM_BITS", "GROUP_SIZE"), form.groups, strict=True))
        return BoundKernel(
            _product_kernel if form.groups is None else grouped_product_kernel,
            **options,
            NUM_IN=num_in,
            NUM_OUT=num_out,
            SPLIT_STEPS=steps_per_part,
            SPLITS_PER_PROGRAM=num_parts,
            IS_EVEN=num_in == num_splits * steps * tile.block_k,
            HAS_BIAS=has_bias and writes_result,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    add = BoundKernel(
        _add_parts_kernel,
        NUM_OUT=num_out,
        SPLITS=num_splits,
        HAS_CHANNEL_SCALES=has_channel_scales,
        HAS_BIAS=has_bias,
        BLOCK=_ADD_BLOCK,
        num_warps=4,
    )
    parts = (num_splits, steps) if batch_invariant else (1, num_splits * steps)  # a sum of each part takes registers
    return _Kernels(
        product(*parts, True), product(1, steps, num_splits == 1), add, -(-num_out // tile.block_n), num_splits
    )


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    row_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    HAS_CHANNEL_SCALES: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    SPLIT_STEPS: tl.constexpr,
    SPLITS_PER_PROGRAM: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes a tile of the sum of SPLITS_PER_PROGRAM parts to out [programs of parts, num_rows, NUM_OUT].

    SCALE_BLOCK inputs and outputs, a multiple of BLOCK_K and of BLOCK_N, share a scale of 8-bit weights; 0: the weights
    have the dtype of x. HAS_ROW_SCALES: x is in 8 bits too, with scales [num_rows, NUM_IN // SCALE_BLOCK].
    HAS_CHANNEL_SCALES: the sum is multiplied by scales [num_rows] of x and [NUM_OUT] of the weights.
    """
    row_tile, column_tile = tile_of_program(num_rows, NUM_OUT, BLOCK_M, BLOCK_N)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = column_tile * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    rows_mask = (rows < num_rows)[:, None]
    columns_mask = columns < NUM_OUT
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * NUM_IN
    weight_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * NUM_IN
    part = tl.program_id(1)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in range(part * SPLITS_PER_PROGRAM, (part + 1) * SPLITS_PER_PROGRAM):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(SPLIT_STEPS):
            first_input = (split * SPLIT_STEPS + step) * BLOCK_K
            inputs = first_input + tl.arange(0, BLOCK_K)
            x_mask = rows_mask
            weight_mask = columns_mask[None, :]
            if not IS_EVEN:
                x_mask = rows_mask & (inputs < NUM_IN)[None, :]
                weight_mask = columns_mask[None, :] & (inputs < NUM_IN)[:, None]
            x = tl.load(x_ptrs + inputs[None, :], mask=x_mask, other=0.0)
            weight = tl.load(weight_ptrs + inputs[:, None], mask=weight_mask, other=0.0)
            if SCALE_BLOCK:
                block = tl.minimum(first_input, NUM_IN - 1) // SCALE_BLOCK  # steps beyond the inputs add zeros
                scale = tl.load(scales_ptr + first_column // SCALE_BLOCK * (NUM_IN // SCALE_BLOCK) + block)
                if HAS_ROW_SCALES:
                    row_scales_ptrs = row_scales_ptr + rows.to(tl.int64) * (NUM_IN // SCALE_BLOCK) + block
                    factor = tl.load(row_scales_ptrs, mask=rows < num_rows, other=0.0)[:, None] * scale
                else:
                    factor = scale
                    weight = widen_float8(weight, x.dtype)
                acc += dot(x, weight, tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * factor
            else:
                acc = dot(x, weight, acc)
        total += acc
    if HAS_CHANNEL_SCALES:
        row_scales = tl.load(row_scales_ptr + rows, mask=rows < num_rows, other=0.0)
        total *= row_scales[:, None] * tl.load(scales_ptr + columns, mask=columns_mask, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=columns_mask, other=0.0).to(tl.float32)[None, :]
    out_rows = part.to(tl.int64) * num_rows + rows
    out_ptrs = out_ptr + out_rows[:, None] * NUM_OUT + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=rows_mask & columns_mask[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    row_scales_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    NUM_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CHANNEL_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds parts [SPLITS, num_rows, NUM_OUT] in order; the other arguments are those of `_product_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < NUM_OUT
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts_ptr + (split * num_rows.to(tl.int64) + row) * NUM_OUT + columns, mask=mask, other=0.0)
    if HAS_CHANNEL_SCALES:
        total *= tl.load(row_scales_ptr + row) * tl.load(scales_ptr + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * NUM_OUT + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
