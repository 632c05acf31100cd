"""Attention of rows with one query token: split-KV (Flash-Decoding), so that a few long rows fill a GPU too.

A program takes the query heads of one KV head, or a tile of them, and one chunk of a row's keys, from the work list of
`decode_plan`. It writes the result of a row that is one chunk; a second kernel merges the chunks of the others. Grids
are upper bounds: programs without work end at once.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import LOG2_E, add_sink, attend, load_queries, start_state, weighted_mean
from kernels.gpu.decode_plan import CHUNK_UNIT, MAX_CHUNKS_PER_ROW, DecodePlan
from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.launch import BoundKernel, is_compile_only
from kernels.gpu.tiles import AttentionTile, head_tiles, rest_block
from kernels.metadata import AttentionMetadata

_CHUNKS_AT_ONCE = 32
"""Most chunks that the merge holds in registers: with heads of 256, 64 values for each of 128 threads."""


def decode_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: GpuKVCache,
    metadata: AttentionMetadata,
    *,
    plan: DecodePlan,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    tile: AttentionTile,
) -> None:
    """Writes the attention of the rows of a plan, of one query token each: the first rows of the batch.

    Args:
        out: [T, num_heads * size of a value], contiguous.
        q: [T, num_heads, head_dim], each token contiguous.
        kv_cache: contiguous.
        metadata: the batch.
        plan: of `decode_plan`, for this batch and window.
        scale, sliding_window, soft_cap, sinks: as of `paged_attention`.
        tile: of `kernels.gpu.tiles`.
    """
    assert CHUNK_UNIT % tile.block_n == 0, f"steps of {tile.block_n} keys cross the borders of chunks"
    num_heads = q.shape[1]
    num_chunks, num_rows = plan.chunks.shape[0], plan.first_chunks.shape[0] - 1
    num_tiles = head_tiles(kv_cache.value_dim, num_heads // kv_cache.num_kv_heads)
    launch, merge = _bind(
        tile,
        num_tiles,
        num_heads // (kv_cache.num_kv_heads * num_tiles),
        kv_cache.head_dim,
        kv_cache.value_dim,
        kv_cache.block_size,
        kv_cache.is_quantized,
        sliding_window is not None,
        soft_cap is not None,
        sinks is not None,
    )
    launch(
        (num_chunks, kv_cache.num_kv_heads * num_tiles),
        out,
        plan.parts,
        plan.part_lse,
        q,
        kv_cache.k,
        kv_cache.v,
        kv_cache.k_scales,
        kv_cache.v_scales,
        q if sinks is None else sinks,
        plan.chunks,
        metadata.block_table,
        q.stride(0),
        metadata.block_table.stride(0),
        sliding_window or 0,
        scale * LOG2_E.value,
        float(soft_cap or 0.0),
    )
    if num_chunks > num_rows or is_compile_only():
        merge((num_rows, num_heads), out, plan.parts, plan.part_lse, plan.first_chunks)


@cache
def _bind(
    tile: AttentionTile,
    num_tiles: int,
    group_size: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    is_quantized: bool,
    has_window: bool,
    has_soft_cap: bool,
    has_sinks: bool,
) -> tuple[BoundKernel, BoundKernel]:
    """Returns the kernel, and the one that merges the chunks of rows."""
    padded_dim = triton.next_power_of_2(value_dim)
    kernel = BoundKernel(
        _decode_attention_kernel,
        HEAD_TILES=num_tiles,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_dim,
        BLOCK_R=rest_block(head_dim, value_dim),
        IS_QUANTIZED=is_quantized,
        HAS_WINDOW=has_window,
        HAS_SOFT_CAP=has_soft_cap,
        HAS_SINKS=has_sinks,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge = BoundKernel(
        _merge_chunks_kernel,
        HEAD_DIM=value_dim,
        BLOCK_D=padded_dim,
        MAX_CHUNKS=MAX_CHUNKS_PER_ROW,
        CHUNKS_AT_ONCE=_CHUNKS_AT_ONCE,
        num_warps=4,
    )
    return kernel, merge


@triton.jit(
    do_not_specialize=["block_table_ptr", "block_table_stride_row", "sliding_window"],
)
def _decode_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    parts_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    sinks_ptr,
    chunks_ptr,
    block_table_ptr,
    q_stride_token,
    block_table_stride_row,
    sliding_window,
    score_scale,
    soft_cap,
    HEAD_TILES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    head_tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    chunks_ptr += chunk * 4
    row = tl.load(chunks_ptr).to(tl.int64)  # and query token: rows of one token come first
    if row < 0:
        return
    start_key = tl.load(chunks_ptr + 1)
    end_key = tl.load(chunks_ptr + 2)
    seq_len = tl.load(chunks_ptr + 3)

    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - sliding_window, 0)
    is_whole_row = (start_key <= first_key) & (end_key == seq_len)
    start_key = tl.maximum(start_key, first_key // BLOCK_N * BLOCK_N)

    group = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    heads = head_tile * GROUP_SIZE + group
    mask = (group < GROUP_SIZE)[:, None] & (columns < VALUE_DIM)[None, :]
    q, q_rest, score_scale = load_queries(
        q_ptr + row * q_stride_token + heads * HEAD_DIM, group < GROUP_SIZE, score_scale,
        HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_R, IS_QUANTIZED,
    )  # fmt: skip

    block_table_ptr += row * block_table_stride_row
    state = start_state(block_table_ptr, start_key, end_key, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_SIZE)
    state = attend(
        q, q_rest, state, start_key, end_key, first_key, end_key,
        tl.zeros((BLOCK_M,), tl.int32) + seq_len - 1,
        k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, head_tile // HEAD_TILES, num_tiles // HEAD_TILES,
        sliding_window, score_scale, soft_cap,
        HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_SIZE, IS_QUANTIZED, HAS_WINDOW, HAS_SOFT_CAP, IS_MASKED=True,
    )  # fmt: skip
    acc, row_max, row_sum = state[0], state[1], state[2]

    if HAS_SINKS and end_key == seq_len:  # with the last chunk
        acc, row_max, row_sum = add_sink(acc, row_max, row_sum, sinks_ptr, heads, group < GROUP_SIZE)
    out = weighted_mean(acc, row_sum, IS_QUANTIZED)
    num_heads = num_tiles * GROUP_SIZE
    if is_whole_row:
        out_ptrs = out_ptr + ((row * num_heads + heads) * VALUE_DIM)[:, None] + columns[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        part_rows = (chunk * num_heads + heads)[:, None]
        tl.store(lse_ptr + part_rows, row_max + tl.log2(row_sum), mask=(group < GROUP_SIZE)[:, None])
        tl.store(parts_ptr + part_rows * VALUE_DIM + columns[None, :], out, mask=mask)


@triton.jit
def _merge_chunks_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    parts_ptr,
    lse_ptr,
    first_chunks_ptr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
):
    """Writes the mean of the chunks of one row and head, weighted by 2 ** lse, if there are several."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    first_chunk = tl.load(first_chunks_ptr + row).to(tl.int64)
    num_chunks = tl.load(first_chunks_ptr + row + 1) - first_chunk
    if num_chunks < 2:
        return
    first_part = first_chunk * num_heads + head

    all_chunks = tl.arange(0, MAX_CHUNKS)
    all_lse = tl.load(lse_ptr + first_part + all_chunks * num_heads, mask=all_chunks < num_chunks, other=-float("inf"))
    largest = tl.max(all_lse, 0)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp2(all_lse - largest), 0)
    total = tl.where(total == 0.0, 1.0, total)

    columns = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = start + tl.arange(0, CHUNKS_AT_ONCE)
        parts = first_part + chunks * num_heads
        lse = tl.load(lse_ptr + parts, mask=chunks < num_chunks, other=-float("inf"))
        mask = (chunks < num_chunks)[:, None] & (columns < HEAD_DIM)[None, :]
        part = tl.load(parts_ptr + parts[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
        acc += tl.sum(part * tl.exp2(lse - largest)[:, None], 0)
    out_ptrs = out_ptr + (row * num_heads + head) * HEAD_DIM + columns
    tl.store(out_ptrs, (acc / total).to(out_ptr.dtype.element_ty), mask=columns < HEAD_DIM)
