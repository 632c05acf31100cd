"""Attention of rows with several query tokens: wide tiles of queries, each of which iterates over the keys it sees.

A tile is some query tokens of one row times the query heads that share a KV head, so that a key is read once for all of
them and matrix instructions are full; many heads are several tiles. Few tiles with many keys are divided by keys as
well, and a second kernel merges their chunks. Each program finds its row, tokens and keys on the device, so that grids
depend on host numbers alone: they are upper bounds, and programs without work end at once.
"""

from functools import cache, partial

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import LOG2_E, add_sink, attend, load_queries, start_state, weighted_mean
from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.launch import BoundKernel, is_compile_only
from kernels.gpu.prefill_plan import CHUNK_UNIT, ROWS_AT_ONCE, find_row, prefill_plan
from kernels.gpu.tiles import AttentionTile, head_tiles, rest_block
from kernels.metadata import AttentionMetadata

_MERGED_ROWS = 8
"""Rows of queries of a program of the merge: few, because the tiles that are divided are few."""

_VALUES_IN_FLIGHT = tl.constexpr(512)
"""Values per row, of several chunks, whose loads the merge issues before it waits for the first of them."""


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
    sinks: torch.Tensor | None,
    tile: AttentionTile,
    num_processors: int,
    batch_invariant: bool = False,
) -> None:
    """Writes the attention of the rows from first_row on.

    Args:
        out: [T, num_heads * size of a value], contiguous.
        q: [T, num_heads, head_dim], each token contiguous.
        kv_cache: contiguous.
        metadata: the batch; rows before first_row have one query token each.
        first_row: the first row to compute.
        scale, sliding_window, soft_cap, sinks: as of `paged_attention`.
        tile: of `kernels.gpu.tiles`.
        num_processors: multiprocessors of the device.
        batch_invariant: a token's result is the same bits with any other tokens in its tile.
    """
    assert CHUNK_UNIT % tile.block_n == 0, f"steps of {tile.block_n} keys cross the borders of chunks"
    num_heads = q.shape[1]
    num_tiles = head_tiles(kv_cache.value_dim, num_heads // kv_cache.num_kv_heads)
    num_groups = kv_cache.num_kv_heads * num_tiles
    group_size = num_heads // num_groups
    plan = prefill_plan(
        metadata,
        first_row=first_row,
        num_tokens=q.shape[0] - first_row,
        num_kv_heads=num_groups,
        head_dim=kv_cache.value_dim,
        block_m=tile.block_m,
        tokens_per_tile=tile.block_m // group_size,
        sliding_window=sliding_window,
        num_processors=num_processors,
        may_divide=not batch_invariant,
    )
    forms, merge = _bind(
        tile,
        num_tiles,
        group_size,
        kv_cache.head_dim,
        kv_cache.value_dim,
        kv_cache.block_size,
        kv_cache.is_quantized,
        sliding_window is not None,
        soft_cap is not None,
        sinks is not None,
        batch_invariant,
    )
    is_divided = plan.max_divided_tiles > 0
    for launch in forms if is_compile_only() and not batch_invariant else (forms[is_divided],):
        launch(
            (plan.max_programs, num_groups),
            out,
            plan.parts,
            plan.part_lse,
            q,
            kv_cache.k,
            kv_cache.v,
            kv_cache.k_scales,
            kv_cache.v_scales,
            q if sinks is None else sinks,
            plan.rows,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            q.stride(0),
            metadata.block_table.stride(0),
            num_groups,
            first_row,
            metadata.num_reqs - first_row,
            sliding_window or 0,
            scale * LOG2_E.value,
            float(soft_cap or 0.0),
        )
    if is_divided or (is_compile_only() and not batch_invariant):
        merge(
            (plan.max_divided_tiles, num_groups, tile.block_m // _MERGED_ROWS),
            out,
            plan.parts,
            plan.part_lse,
            plan.rows,
            metadata.query_start_loc,
            first_row,
            metadata.num_reqs - first_row,
        )


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
    is_invariant: bool,
) -> tuple[tuple[BoundKernel, BoundKernel], BoundKernel]:
    """Returns the kernel of steps whose tiles are all whole, that of other steps, and the one that merges chunks."""
    kernel = partial(
        BoundKernel,
        _prefill_attention_kernel,
        HEAD_TILES=num_tiles,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=triton.next_power_of_2(value_dim),
        BLOCK_R=rest_block(head_dim, value_dim),
        IS_QUANTIZED=is_quantized,
        HAS_WINDOW=has_window,
        HAS_SOFT_CAP=has_soft_cap,
        HAS_SINKS=has_sinks,
        IS_INVARIANT=is_invariant,
        CHUNK_UNIT=CHUNK_UNIT,
        ROWS_AT_ONCE=ROWS_AT_ONCE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge = BoundKernel(
        _merge_tile_chunks_kernel,
        GROUP_SIZE=group_size,
        HEAD_DIM=value_dim,
        BLOCK_M=tile.block_m,
        BLOCK_D=triton.next_power_of_2(value_dim),
        MERGED_ROWS=_MERGED_ROWS,
        ROWS_AT_ONCE=ROWS_AT_ONCE,
        num_warps=4,
    )
    return (kernel(IS_DIVIDED=False), kernel(IS_DIVIDED=True)), merge


@triton.jit(
    do_not_specialize=[
        "plan_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "block_table_ptr",
        "block_table_stride_row",
        "num_groups",
        "first_row",
        "num_rows",
        "sliding_window",
    ]
)
def _prefill_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    parts_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    sinks_ptr,
    plan_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    q_stride_token,
    block_table_stride_row,
    num_groups,
    first_row,
    num_rows,
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
    IS_INVARIANT: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    CHUNK_UNIT: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_SIZE
    # Later tokens see more keys and are scheduled first, so that the last programs are short.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    kv_head = group // HEAD_TILES
    num_kv_heads = num_groups // HEAD_TILES
    if IS_DIVIDED:
        if program >= tl.load(plan_ptr + num_rows):
            return
        plan_row, first_program = find_row(plan_ptr, num_rows, program, ROWS_AT_ONCE)
    else:
        plan_row, first_program = _find_whole_tile(
            query_start_loc_ptr + first_row, num_rows, program, BLOCK_Q, ROWS_AT_ONCE
        )
    index = program - first_program
    row = first_row + plan_row
    query_start = tl.load(query_start_loc_ptr + row)
    query_len = tl.load(query_start_loc_ptr + row + 1) - query_start
    first_token = index * BLOCK_Q
    if IS_DIVIDED:
        plan_ptr += plan_row
        num_chunks = tl.load(plan_ptr + num_rows + 1)
        chunk_keys = tl.load(plan_ptr + 2 * (num_rows + 1)) * CHUNK_UNIT
        part = tl.load(plan_ptr + 3 * (num_rows + 1)) + index
        first_token = index // num_chunks * BLOCK_Q
    elif first_token >= query_len:
        return
    context_len = tl.load(seq_lens_ptr + row) - query_len  # -1 for padding, which then sees no key

    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    tokens = first_token + rows // GROUP_SIZE
    heads = group * GROUP_SIZE + rows % GROUP_SIZE
    is_used = (tokens < query_len) & (rows < BLOCK_Q * GROUP_SIZE)
    mask = is_used[:, None] & (columns < VALUE_DIM)[None, :]
    indices = (query_start + tokens).to(tl.int64)
    q, q_rest, score_scale = load_queries(
        q_ptr + indices * q_stride_token + heads * HEAD_DIM, is_used, score_scale,
        HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_R, IS_QUANTIZED,
    )  # fmt: skip

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
    if IS_DIVIDED:  # the only chunk of a tile ends with it
        chunk_start = first_key // CHUNK_UNIT * CHUNK_UNIT + index % num_chunks * chunk_keys
        start_key = tl.maximum(start_key, chunk_start)
        end_key = tl.minimum(end_key, chunk_start + chunk_keys)
        if HAS_WINDOW:
            first_key = tl.maximum(first_key, start_key)
        seen_stop = tl.minimum(seen_stop, end_key)
        seen_start = tl.maximum(seen_start, start_key)
    # These ranges depend on the tokens of the tile. With IS_INVARIANT one masked loop takes all keys, so that a key
    # goes through the same instructions in any tile. A step in which a token sees no key does not change its state.
    if IS_INVARIANT:
        seen_start = start_key
        seen_stop = start_key
    block_table_ptr += row.to(tl.int64) * block_table_stride_row
    state = start_state(block_table_ptr, start_key, end_key, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_SIZE)
    if HAS_WINDOW and not IS_INVARIANT:
        state = attend(
            q, q_rest, state, start_key, tl.minimum(seen_start, end_key), first_key, end_key,
            positions, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, kv_head, num_kv_heads,
            sliding_window, score_scale, soft_cap,
            HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_SIZE, IS_QUANTIZED, HAS_WINDOW, HAS_SOFT_CAP, True,
        )  # fmt: skip
    if not IS_INVARIANT:
        state = attend(
            q, q_rest, state, seen_start, seen_stop, first_key, end_key,
            positions, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, kv_head, num_kv_heads,
            sliding_window, score_scale, soft_cap,
            HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_SIZE, IS_QUANTIZED, HAS_WINDOW, HAS_SOFT_CAP, False,
        )  # fmt: skip
    state = attend(
        q, q_rest, state, tl.maximum(seen_start, seen_stop), end_key, first_key, end_key,
        positions, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, kv_head, num_kv_heads,
        sliding_window, score_scale, soft_cap,
        HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_SIZE, IS_QUANTIZED, HAS_WINDOW, HAS_SOFT_CAP, True,
    )  # fmt: skip
    acc, row_max, row_sum, _ = state

    if HAS_SINKS:
        has_head = rows < BLOCK_Q * GROUP_SIZE
        if IS_DIVIDED:  # with the first chunk
            if index % num_chunks == 0:
                acc, row_max, row_sum = add_sink(acc, row_max, row_sum, sinks_ptr, heads, has_head)
        else:
            acc, row_max, row_sum = add_sink(acc, row_max, row_sum, sinks_ptr, heads, has_head)
    out = weighted_mean(acc, row_sum, IS_QUANTIZED)
    if IS_DIVIDED and num_chunks > 1:
        part_rows = ((part.to(tl.int64) * num_groups + group) * BLOCK_M + rows)[:, None]
        tl.store(lse_ptr + part_rows, row_max + tl.log2(row_sum))
        tl.store(parts_ptr + part_rows * VALUE_DIM + columns[None, :], out, mask=mask)
        return
    out_ptrs = out_ptr + (indices * (num_groups * GROUP_SIZE) + heads)[:, None] * VALUE_DIM + columns[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _find_whole_tile(starts_ptr, num_rows, tile, BLOCK_Q: tl.constexpr, ROWS_AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the row of a tile and the number of that row's first tile, where every tile is one program.

    Row i begins with tile number (query tokens before it) // BLOCK_Q + (rows before it). This reserves a partial last
    tile for every row and needs no sum over the tiles of earlier rows. Unused numbers, at most one per row, count as
    part of the row before them.

    Args:
        starts_ptr: [num_rows], the first query token of each row.
        num_rows, tile: rows, and the number to find.
        BLOCK_Q: query tokens of a tile.
        ROWS_AT_ONCE: rows of a load.
    """
    first_token = tl.load(starts_ptr)
    row = -1
    first_tile = 0
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = start + tl.arange(0, ROWS_AT_ONCE)
        tokens = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
        first_tiles = (tokens - first_token) // BLOCK_Q + rows
        begins_before = (first_tiles <= tile) & (rows < num_rows)
        row += tl.sum(begins_before.to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(begins_before, first_tiles, 0), 0))
    return row, first_tile


@triton.jit(do_not_specialize=["plan_ptr", "query_start_loc_ptr", "first_row", "num_rows"])
def _merge_tile_chunks_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    parts_ptr,
    lse_ptr,
    plan_ptr,
    query_start_loc_ptr,
    first_row,
    num_rows,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    """Writes the mean of the chunks of MERGED_ROWS rows of queries of a divided tile, weighted by 2 ** lse."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_SIZE
    divided_tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    stride = num_rows + 1
    if divided_tile >= tl.load(plan_ptr + 4 * stride + num_rows):
        return
    plan_row, first_tile = find_row(plan_ptr + 4 * stride, num_rows, divided_tile, ROWS_AT_ONCE)
    num_chunks = tl.load(plan_ptr + stride + plan_row)
    tile = divided_tile - first_tile
    part = tl.load(plan_ptr + 3 * stride + plan_row).to(tl.int64) + tile * num_chunks
    query_start = tl.load(query_start_loc_ptr + first_row + plan_row)
    query_len = tl.load(query_start_loc_ptr + first_row + plan_row + 1) - query_start

    rows = tl.program_id(2) * MERGED_ROWS + tl.arange(0, MERGED_ROWS)
    columns = tl.arange(0, BLOCK_D)
    tokens = tile * BLOCK_Q + rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    is_used = (tokens < query_len) & (rows < BLOCK_Q * GROUP_SIZE)
    mask = is_used[:, None] & (columns < HEAD_DIM)[None, :]
    part_rows = (part * num_kv_heads + kv_head) * BLOCK_M + rows
    largest = tl.full((MERGED_ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((MERGED_ROWS,), tl.float32)
    acc = tl.zeros((MERGED_ROWS, BLOCK_D), tl.float32)
    for _ in tl.range(0, num_chunks, loop_unroll_factor=_VALUES_IN_FLIGHT // BLOCK_D):
        lse = tl.load(lse_ptr + part_rows, mask=is_used, other=-float("inf"))
        values = tl.load(parts_ptr + part_rows[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
        new_largest = tl.maximum(largest, lse)
        finite = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        correction = tl.exp2(largest - finite)
        weight = tl.exp2(lse - finite)
        acc = acc * correction[:, None] + values * weight[:, None]
        total = total * correction + weight
        largest = new_largest
        part_rows += num_kv_heads * BLOCK_M
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    indices = (query_start + tokens).to(tl.int64)
    out_ptrs = out_ptr + (indices * (num_kv_heads * GROUP_SIZE) + heads)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
