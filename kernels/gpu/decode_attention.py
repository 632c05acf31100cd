"""Attention of rows with one query token: split-KV (Flash-Decoding), so that a few long rows fill a GPU too.

A program takes the query heads of one KV head and one part of a row's keys; parts are equal and computed on the device.
If rows are split, a second kernel merges the parts; otherwise the first writes the result.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import LOG2_E, attend, dot_queries, first_block_ids, weighted_mean
from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.launch import launch
from kernels.gpu.tiles import MAX_SPLITS, AttentionTile
from kernels.metadata import AttentionMetadata

_SPLITS_AT_ONCE = 32
"""Most parts that the merge holds in registers: with heads of 256, 64 values for each of 128 threads."""


def decode_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: GpuKVCache,
    metadata: AttentionMetadata,
    *,
    num_rows: int,
    num_splits: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    tile: AttentionTile,
) -> None:
    """Writes the attention of the first num_rows rows, of one query token each.

    Args:
        out: [T, num_heads * head_dim], contiguous.
        q: [T, num_heads, head_dim], each token contiguous.
        kv_cache: contiguous.
        metadata: the batch.
        num_rows: rows to compute.
        num_splits: parts of each row, 1..MAX_SPLITS.
        scale, sliding_window, soft_cap: as of `paged_attention`.
        tile: of `kernels.gpu.tiles`.
    """
    num_heads, head_dim = q.shape[1:]
    if num_splits == 1:
        parts = part_lse = out
    else:
        parts = torch.empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((num_rows, num_heads, num_splits), dtype=torch.float32, device=q.device)
    padded_head_dim = triton.next_power_of_2(head_dim)
    launch(
        _decode_attention_kernel,
        (num_rows, kv_cache.num_kv_heads, num_splits),
        parts,
        part_lse,
        q,
        kv_cache.k,
        kv_cache.v,
        kv_cache.k_scales,
        kv_cache.v_scales,
        metadata.seq_lens,
        metadata.block_table,
        q.stride(0),
        metadata.block_table.stride(0),
        sliding_window or 0,
        scale * LOG2_E.value,
        float(soft_cap or 0.0),
        GROUP_SIZE=num_heads // kv_cache.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim,
        IS_SPLIT=num_splits > 1,
        IS_QUANTIZED=kv_cache.is_quantized,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        launch(
            _merge_splits_kernel,
            (num_rows, num_heads),
            out,
            parts,
            part_lse,
            num_splits,
            HEAD_DIM=head_dim,
            BLOCK_D=padded_head_dim,
            MAX_SPLITS=MAX_SPLITS,
            SPLITS_AT_ONCE=_SPLITS_AT_ONCE,
            num_warps=4,
        )


@triton.jit(
    do_not_specialize=["seq_lens_ptr", "block_table_ptr", "block_table_stride_row", "sliding_window"],
)
def _decode_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    seq_lens_ptr,
    block_table_ptr,
    q_stride_token,
    block_table_stride_row,
    sliding_window,
    score_scale,
    soft_cap,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # and query token: rows of one token come first
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens_ptr + row)

    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - sliding_window, 0)
    start_step = first_key // BLOCK_N
    num_steps = tl.cdiv(tl.cdiv(seq_len, BLOCK_N) - start_step, num_splits)
    start_key = (start_step + split * num_steps) * BLOCK_N
    end_key = tl.minimum(start_key + num_steps * BLOCK_N, seq_len)

    group = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP_SIZE + group
    mask = (group < GROUP_SIZE)[:, None] & (columns < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + row * q_stride_token + (heads * HEAD_DIM)[:, None] + columns[None, :]
    q, score_scale = dot_queries(tl.load(q_ptrs, mask=mask, other=0.0), score_scale, IS_QUANTIZED)

    block_table_ptr += row * block_table_stride_row
    block_ids = first_block_ids(block_table_ptr, start_key, end_key, BLOCK_N, BLOCK_SIZE)
    acc, row_max, row_sum, block_ids = attend(
        q,
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        tl.full((BLOCK_M, 1), -float("inf"), tl.float32),
        tl.zeros((BLOCK_M, 1), tl.float32),
        block_ids, start_key, end_key, first_key, end_key,
        tl.zeros((BLOCK_M,), tl.int32) + seq_len - 1,
        k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, kv_head, num_kv_heads,
        sliding_window, score_scale, soft_cap,
        HEAD_DIM, BLOCK_N, BLOCK_SIZE, IS_QUANTIZED, HAS_WINDOW, HAS_SOFT_CAP, IS_MASKED=True,
    )  # fmt: skip

    out = weighted_mean(acc, row_sum, IS_QUANTIZED)
    out_rows = (row * num_kv_heads * GROUP_SIZE + heads)[:, None]
    if IS_SPLIT:
        out_rows = out_rows * num_splits + split
        is_empty = row_sum == 0.0
        lse = tl.where(is_empty, -float("inf"), row_max + tl.log2(tl.where(is_empty, 1.0, row_sum)))
        tl.store(lse_ptr + out_rows, lse, mask=(group < GROUP_SIZE)[:, None])
        mask &= start_key < end_key  # of an empty part only the flag is read
    tl.store(out_ptr + out_rows * HEAD_DIM + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    parts_ptr,
    lse_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
):
    """Mean of the parts of one row and head, weighted by 2 ** lse; zeros if all of them are empty."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    lse_ptr += row * num_splits
    parts_ptr += row * num_splits * HEAD_DIM

    all_splits = tl.arange(0, MAX_SPLITS)
    all_lse = tl.load(lse_ptr + all_splits, mask=all_splits < num_splits, other=-float("inf"))
    largest = tl.max(all_lse, 0)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp2(all_lse - largest), 0)
    total = tl.where(total == 0.0, 1.0, total)

    columns = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_splits, SPLITS_AT_ONCE):
        splits = start + tl.arange(0, SPLITS_AT_ONCE)
        lse = tl.load(lse_ptr + splits, mask=splits < num_splits, other=-float("inf"))
        mask = (lse != -float("inf"))[:, None] & (columns < HEAD_DIM)[None, :]
        part = tl.load(parts_ptr + splits[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
        acc += tl.sum(part * tl.exp2(lse - largest)[:, None], 0)
    tl.store(out_ptr + row * HEAD_DIM + columns, (acc / total).to(out_ptr.dtype.element_ty), mask=columns < HEAD_DIM)
