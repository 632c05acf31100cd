"""Linear layers whose results do not depend on the batch, for `--batch-invariant`.

A vendor's library chooses tiles and splits by the number of rows, and with them the order of summation (Horace He et
al., "Defeating Nondeterminism in LLM Inference", 2025). Here both follow from the weights alone. The inputs of a layer
are divided into parts. Each part is summed tile by tile in fp32, and the sums of the parts are added in order. A small
batch has one program per part, to fill the GPU, and a second kernel adds the sums; in a large batch one program takes
all parts. Either way each element is the result of the same sequence of instructions.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import dot
from kernels.gpu.launch import BoundKernel, is_compile_only
from kernels.gpu.linear import PackedLinear
from kernels.gpu.rows import check_rows
from kernels.gpu.targets import Target
from kernels.gpu.tiles import product_splits, product_tile

_ADD_BLOCK = 1024
_ROW_TILES = 8
"""Tiles of rows whose programs are adjacent: they read the same weights while these are in the L2 cache."""


def invariant_linear(x: torch.Tensor, packed: PackedLinear, *, target: Target, num_processors: int) -> torch.Tensor:
    """Returns x [T, in] @ weight [out, in]^T + bias [out], [T, out] in the model's dtype, summed in a fixed order.

    Args:
        x: contiguous, fp32, fp16 or bf16.
        packed: the layer, not quantised.
        target: architecture of the device; decides the tile.
        num_processors: multiprocessors of the device; they decide how many programs share the work.
    Raises: ValueError: rows of another width.
    """
    check_rows(x=x)
    num_rows, num_in = x.shape
    num_out = packed.out_features
    if num_in != packed.in_features:
        raise ValueError(f"rows of x have {num_in} values, the layer takes {packed.in_features}")
    assert packed.scales is None, "quantised layers are refused at start"
    kernel = _bind(target, num_in, num_out, packed.dtype.itemsize, packed.bias is not None)
    num_tiles = -(-num_rows // kernel.block_m) * kernel.num_column_tiles
    out = torch.empty(num_rows, num_out, dtype=packed.dtype, device=x.device)
    bias = packed.weight if packed.bias is None else packed.bias
    if is_compile_only() or kernel.num_splits == 1 or num_tiles >= num_processors:
        kernel.whole((num_tiles, 1), x, packed.weight, bias, out, num_rows)
    if kernel.num_splits > 1 and (is_compile_only() or num_tiles < num_processors):
        parts = torch.empty(kernel.num_splits, num_rows, num_out, dtype=torch.float32, device=x.device)
        kernel.part((num_tiles, kernel.num_splits), x, packed.weight, bias, parts, num_rows)
        kernel.add((num_rows, -(-num_out // _ADD_BLOCK)), parts, bias, out, num_rows)
    return out


class _Kernels(NamedTuple):
    """Kernels of a layer.

    Attributes:
        whole: sums all parts and writes the result.
        part: sums one part in each program.
        add: adds the sums of the parts and writes the result.
        block_m: rows of a tile.
        num_column_tiles: tiles of a row of the result.
        num_splits: parts of the inputs.
    """

    whole: BoundKernel
    part: BoundKernel
    add: BoundKernel
    block_m: int
    num_column_tiles: int
    num_splits: int


@cache
def _bind(target: Target, num_in: int, num_out: int, itemsize: int, has_bias: bool) -> _Kernels:
    tile = product_tile(target, itemsize)
    num_splits = product_splits(tile, num_in, num_out)
    split_steps = -(-num_in // (tile.block_k * num_splits))

    def product(splits_per_program: int) -> BoundKernel:
        return BoundKernel(
            _product_kernel,
            NUM_IN=num_in,
            NUM_OUT=num_out,
            SPLIT_STEPS=split_steps,
            SPLITS_PER_PROGRAM=splits_per_program,
            IS_EVEN=num_in == num_splits * split_steps * tile.block_k,
            HAS_BIAS=has_bias and splits_per_program == num_splits,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            ROW_TILES=_ROW_TILES,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    add = BoundKernel(
        _add_parts_kernel, NUM_OUT=num_out, SPLITS=num_splits, HAS_BIAS=has_bias, BLOCK=_ADD_BLOCK, num_warps=4
    )
    return _Kernels(product(num_splits), product(1), add, tile.block_m, -(-num_out // tile.block_n), num_splits)


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    SPLIT_STEPS: tl.constexpr,
    SPLITS_PER_PROGRAM: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    """Writes a tile of the sum of SPLITS_PER_PROGRAM parts to out [programs of parts, num_rows, NUM_OUT]."""
    COLUMN_TILES: tl.constexpr = (NUM_OUT + BLOCK_N - 1) // BLOCK_N
    first_row_tile = tl.program_id(0) // (ROW_TILES * COLUMN_TILES) * ROW_TILES
    num_row_tiles = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first_row_tile, ROW_TILES)
    tile = tl.program_id(0) % (ROW_TILES * COLUMN_TILES)
    rows = (first_row_tile + tile % num_row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile // num_row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    rows_mask = (rows < num_rows)[:, None]
    columns_mask = columns < NUM_OUT
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * NUM_IN
    weight_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * NUM_IN
    part = tl.program_id(1)

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in range(part * SPLITS_PER_PROGRAM, (part + 1) * SPLITS_PER_PROGRAM):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(SPLIT_STEPS):
            inputs = (split * SPLIT_STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
            x_mask = rows_mask
            weight_mask = columns_mask[None, :]
            if not IS_EVEN:
                x_mask = rows_mask & (inputs < NUM_IN)[None, :]
                weight_mask = columns_mask[None, :] & (inputs < NUM_IN)[:, None]
            x = tl.load(x_ptrs + inputs[None, :], mask=x_mask, other=0.0)
            weight = tl.load(weight_ptrs + inputs[:, None], mask=weight_mask, other=0.0)
            acc = dot(x, weight, acc)
        total += acc
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=columns_mask, other=0.0).to(tl.float32)[None, :]
    out_rows = part.to(tl.int64) * num_rows + rows
    out_ptrs = out_ptr + out_rows[:, None] * NUM_OUT + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=rows_mask & columns_mask[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    NUM_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds parts [SPLITS, num_rows, NUM_OUT] in order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < NUM_OUT
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts_ptr + (split * num_rows.to(tl.int64) + row) * NUM_OUT + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * NUM_OUT + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
