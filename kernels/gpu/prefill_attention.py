"""Attention of rows with several query tokens: wide tiles of queries, each of which iterates over the keys it sees.

A tile is some query tokens of one row times the query heads that share a KV head, so that a key is read once for all of
them and matrix instructions are full. Each program finds its row and tokens on the device, so that the grid depends on
shapes alone.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import LOG2_E, add_values, attend, dot_queries, start_state, weighted_mean
from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.launch import BoundKernel
from kernels.gpu.tiles import AttentionTile
from kernels.metadata import AttentionMetadata

_ROWS_AT_ONCE = 1024
"""Rows whose starts a program loads at once when it searches for its own: one load for most batches, where a binary
search would wait for several loads in sequence."""


def prefill_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: GpuKVCache,
    metadata: AttentionMetadata,
    *,
    first_row: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tile: AttentionTile,
    batch_invariant: bool = False,
) -> None:
    """Writes the attention of the rows from first_row on.

    Args:
        out: [T, num_heads * head_dim], contiguous.
        q: [T, num_heads, head_dim], each token contiguous.
        kv_cache: contiguous.
        metadata: the batch; rows before first_row have one query token each.
        first_row: the first row to compute.
        scale, sliding_window, soft_cap: as of `paged_attention`.
        tile: of `kernels.gpu.tiles`.
        batch_invariant: a token's result is the same bits with any other tokens in its tile.
    """
    num_heads, head_dim = q.shape[1:]
    group_size = num_heads // kv_cache.num_kv_heads
    num_rows = metadata.num_reqs - first_row
    max_tiles = (q.shape[0] - first_row) // (tile.block_m // group_size) + num_rows
    launch = _bind(
        tile,
        group_size,
        head_dim,
        kv_cache.block_size,
        kv_cache.is_quantized,
        sliding_window is not None,
        soft_cap is not None,
        batch_invariant,
    )
    launch(
        (max_tiles, kv_cache.num_kv_heads),
        out,
        q,
        kv_cache.k,
        kv_cache.v,
        kv_cache.k_scales,
        kv_cache.v_scales,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        q.stride(0),
        metadata.block_table.stride(0),
        kv_cache.num_kv_heads,
        first_row,
        metadata.num_reqs,
        sliding_window or 0,
        scale * LOG2_E.value,
        float(soft_cap or 0.0),
    )


@cache
def _bind(
    tile: AttentionTile,
    group_size: int,
    head_dim: int,
    block_size: int,
    is_quantized: bool,
    has_window: bool,
    has_soft_cap: bool,
    is_invariant: bool,
) -> BoundKernel:
    return BoundKernel(
        _prefill_attention_kernel,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        IS_QUANTIZED=is_quantized,
        HAS_WINDOW=has_window,
        HAS_SOFT_CAP=has_soft_cap,
        LATE_VALUES=tile.late_values,
        IS_INVARIANT=is_invariant,
        ROWS_AT_ONCE=_ROWS_AT_ONCE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(
    do_not_specialize=[
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "block_table_ptr",
        "block_table_stride_row",
        "num_kv_heads",
        "first_row",
        "num_rows",
        "sliding_window",
    ]
)
def _prefill_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    q_stride_token,
    block_table_stride_row,
    num_kv_heads,
    first_row,
    num_rows,
    sliding_window,
    score_scale,
    soft_cap,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    LATE_VALUES: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_SIZE
    # Later tokens see more keys and are scheduled first, so that the last programs are short.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row, first_tile = _find_row(query_start_loc_ptr, first_row, num_rows, tile, BLOCK_Q, ROWS_AT_ONCE)
    query_start = tl.load(query_start_loc_ptr + row)
    query_len = tl.load(query_start_loc_ptr + row + 1) - query_start
    first_token = (tile - first_tile) * BLOCK_Q
    if first_token >= query_len:
        return
    context_len = tl.load(seq_lens_ptr + row) - query_len  # -1 for padding, which then sees no key

    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    tokens = first_token + rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    mask = (tokens < query_len) & (rows < BLOCK_Q * GROUP_SIZE)
    mask = mask[:, None] & (columns < HEAD_DIM)[None, :]
    indices = (query_start + tokens).to(tl.int64)
    q_ptrs = q_ptr + (indices * q_stride_token + heads * HEAD_DIM)[:, None] + columns[None, :]
    q, score_scale = dot_queries(tl.load(q_ptrs, mask=mask, other=0.0), score_scale, IS_QUANTIZED)

    positions = context_len + tokens
    first_position = context_len + first_token
    end_key = context_len + tl.minimum(first_token + BLOCK_Q, query_len)
    # Three ranges of keys: cut by the window of some token, seen by all tokens, and cut by causality.
    first_key = 0
    seen_start = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - sliding_window + 1, 0)
        seen_start = tl.cdiv(tl.maximum(end_key - sliding_window, 0), BLOCK_N) * BLOCK_N
    seen_stop = (first_position + 1) // BLOCK_N * BLOCK_N

    start_key = first_key // BLOCK_N * BLOCK_N
    # These ranges depend on the tokens of the tile. With IS_INVARIANT one masked loop takes all keys, so that a key
    # goes through the same instructions in any tile. A step in which a token sees no key does not change its state.
    if IS_INVARIANT:
        seen_start = start_key
        seen_stop = start_key
    block_table_ptr += row.to(tl.int64) * block_table_stride_row
    state = start_state(block_table_ptr, start_key, end_key, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_SIZE)
    if HAS_WINDOW and not IS_INVARIANT:
        state = attend(
            q, state, start_key, tl.minimum(seen_start, end_key), first_key, end_key,
            positions, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, kv_head, num_kv_heads,
            sliding_window, score_scale, soft_cap,
            HEAD_DIM, BLOCK_N, BLOCK_SIZE, IS_QUANTIZED, HAS_WINDOW, HAS_SOFT_CAP, True, LATE_VALUES,
        )  # fmt: skip
    if not IS_INVARIANT:
        state = attend(
            q, state, seen_start, seen_stop, first_key, end_key,
            positions, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, kv_head, num_kv_heads,
            sliding_window, score_scale, soft_cap,
            HEAD_DIM, BLOCK_N, BLOCK_SIZE, IS_QUANTIZED, HAS_WINDOW, HAS_SOFT_CAP, False, LATE_VALUES,
        )  # fmt: skip
    state = attend(
        q, state, tl.maximum(seen_start, seen_stop), end_key, first_key, end_key,
        positions, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, kv_head, num_kv_heads,
        sliding_window, score_scale, soft_cap,
        HEAD_DIM, BLOCK_N, BLOCK_SIZE, IS_QUANTIZED, HAS_WINDOW, HAS_SOFT_CAP, True, LATE_VALUES,
    )  # fmt: skip
    acc, _, row_sum, weights, correction, _, v_block_ids = state
    if LATE_VALUES:
        acc = add_values(
            acc, weights, correction, v_block_ids, (end_key - 1) // BLOCK_N * BLOCK_N, first_key, end_key,
            v_ptr, kv_head, num_kv_heads, q.dtype, HEAD_DIM, BLOCK_SIZE, IS_MASKED=True,
        )  # fmt: skip

    out = weighted_mean(acc, row_sum, IS_QUANTIZED)
    out_ptrs = out_ptr + (indices * (num_kv_heads * GROUP_SIZE) + heads)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _find_row(query_start_loc_ptr, first_row, num_rows, tile, BLOCK_Q: tl.constexpr, ROWS_AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row of a tile, and the number of that row's first tile.

    Row i begins with tile number (query tokens before it) // BLOCK_Q + (rows before it). This reserves a partial last
    tile for every row and needs no sum over the tiles of earlier rows. Unused numbers, at most one per row, count as
    part of the row before them.
    """
    first_token = tl.load(query_start_loc_ptr + first_row)
    row = first_row - 1
    first_tile = 0
    for start in range(first_row, num_rows, ROWS_AT_ONCE):
        rows = start + tl.arange(0, ROWS_AT_ONCE)
        tokens = tl.load(query_start_loc_ptr + rows, mask=rows < num_rows, other=0)
        first_tiles = (tokens - first_token) // BLOCK_Q + rows - first_row
        begins_before = (first_tiles <= tile) & (rows < num_rows)
        row += tl.sum(begins_before.to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(begins_before, first_tiles, 0), 0))
    return row, first_tile
