"""Rotary position embedding (arXiv:2104.09864, half-split layout) and the write of keys and values to the paged cache.

One launch over the output of the QKV projection, with an RMSNorm of each query and key head before the rotation if the
model has one. A program takes one token and some of its heads: queries, or keys with their values. Computes in fp32.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gpu.float8 import float8_scale, store_float8
from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.launch import BoundKernel
from kernels.gpu.rows import check_columns
from kernels.gpu.targets import Target
from kernels.gpu.tiles import head_tile


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: GpuKVCache,
    slot_mapping: torch.Tensor,
    *,
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    target: Target,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates queries and keys, and writes keys and values to their slots.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys, values, or columns of wider rows with them;
            without values if the cache has them in the keys; fp32, fp16 or bf16.
        positions: [T] int64, rows of the tables.
        cos, sin: [max_positions, head_dim // 2] fp32, contiguous.
        kv_cache: of the layer; its dtype may differ from that of qkv.
        slot_mapping: [T] int64, block_id * block_size + offset of each token; below 0 for rows of padding, whose keys
            and values are not stored.
        head_norms: [head_dim] each, in one dtype: RMSNorm of every query and key head before the rotation.
        eps: of these norms.
        target: of the GPU.
        out: [T, num_heads, head_dim], contiguous, dtype of qkv, for the result; None: it is allocated.
    Returns: rotated queries [T, num_heads, head_dim], contiguous, dtype of qkv.
    Raises: ValueError: shapes or dtypes disagree.
    """
    check_columns(qkv=qkv)
    head_dim, num_kv_heads = kv_cache.head_dim, kv_cache.num_kv_heads
    num_tokens, num_heads = qkv.shape[0], kv_cache.num_query_heads(qkv, cos, sin)
    if not positions.shape == slot_mapping.shape == (num_tokens,):
        raise ValueError(
            f"qkv has {num_tokens} tokens, positions {list(positions.shape)}, slot_mapping {list(slot_mapping.shape)}"
        )
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device) if out is None else out
    q_norm, k_norm = (cos, cos) if head_norms is None else head_norms
    launch, num_groups = _bind(
        num_heads,
        num_kv_heads,
        head_dim,
        kv_cache.block_size,
        kv_cache.value_dim == head_dim,
        head_norms is not None,
        kv_cache.is_quantized,
        target.warp_size,
    )
    launch(
        (num_tokens, num_groups),
        qkv,
        positions,
        cos,
        sin,
        q_norm,
        k_norm,
        slot_mapping,
        q,
        kv_cache.k,
        kv_cache.v,
        kv_cache.k_scales,
        kv_cache.v_scales,
        eps,
        qkv.stride(0),
    )
    return q


@cache
def _bind(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    has_values: bool,
    norms: bool,
    quantizes: bool,
    warp_size: int,
) -> tuple[BoundKernel, int]:
    """Returns the kernel for these heads, and its programs per token."""
    tile = head_tile(num_heads, head_dim, warp_size)
    kernel = BoundKernel(
        _rotate_and_store_kernel,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_VALUES=has_values,
        NORMS=norms,
        QUANTIZES=quantizes,
        BLOCK_H=tile.block_h,
        BLOCK_D=tile.block_d,
        num_warps=tile.num_warps,
    )
    return kernel, triton.cdiv(num_heads, tile.block_h) + triton.cdiv(num_kv_heads, tile.block_h)


@triton.jit
def _load_halves(ptrs, mask, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _normed(first, second, weight_ptrs, mask, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Applies RMSNorm to each head."""
    mean_square = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
    factor = tl.rsqrt(mean_square + eps)[:, None]
    first_weight, second_weight = _load_halves(weight_ptrs, mask, HALF)
    return first * factor * first_weight, second * factor * second_weight


@triton.jit
def _store_halves(ptrs, first, second, mask, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(ptrs, first.to(ptrs.dtype.element_ty), mask=mask)
    tl.store(ptrs + HALF, second.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _store_cached(  # type: ignore[no-untyped-def]
    cache_ptr, scales_ptr, rows, pairs, first, second, rows_mask, mask, HALF: tl.constexpr, QUANTIZES: tl.constexpr
):
    """Writes heads [BLOCK_H, head_dim] to rows [BLOCK_H] of a cache seen as rows of one token and head."""
    ptrs = cache_ptr + rows[:, None] * (2 * HALF) + pairs
    if QUANTIZES:
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)
        scale, factor = float8_scale(largest, cache_ptr.dtype.element_ty)
        store_float8(ptrs, first * factor[:, None], mask)
        store_float8(ptrs + HALF, second * factor[:, None], mask)
        tl.store(scales_ptr + rows, scale, mask=rows_mask)
    else:
        _store_halves(ptrs, first, second, mask, HALF)


# both are read one by one, at any alignment within the packed inputs of a step
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rotate_and_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    slots_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    eps,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    NORMS: tl.constexpr,
    QUANTIZES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Processes BLOCK_H query heads of one token, or BLOCK_H of its key heads with their values."""
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_QUERY_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    token_ptr = qkv_ptr + token * qkv_stride
    pairs = tl.arange(0, BLOCK_D)[None, :]
    angles = tl.load(positions_ptr + token) * HALF + pairs
    cos = tl.load(cos_ptr + angles, mask=pairs < HALF, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=pairs < HALF, other=0.0)
    if group < NUM_QUERY_GROUPS:
        heads = group * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (heads < NUM_HEADS)[:, None] & (pairs < HALF)
        offsets = heads[:, None] * HEAD_DIM + pairs
        first, second = _load_halves(token_ptr + offsets, mask, HALF)
        if NORMS:
            first, second = _normed(first, second, q_norm_ptr + pairs, pairs < HALF, eps, HALF)
        out_ptrs = q_ptr + token * (NUM_HEADS * HEAD_DIM) + offsets
        _store_halves(out_ptrs, first * cos - second * sin, second * cos + first * sin, mask, HALF)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            heads = (group - NUM_QUERY_GROUPS) * BLOCK_H + tl.arange(0, BLOCK_H)
            heads_mask = heads < NUM_KV_HEADS
            mask = heads_mask[:, None] & (pairs < HALF)
            key_ptrs = token_ptr + NUM_HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM + pairs
            first, second = _load_halves(key_ptrs, mask, HALF)
            if HAS_VALUES:
                value_first, value_second = _load_halves(key_ptrs + NUM_KV_HEADS * HEAD_DIM, mask, HALF)
            if NORMS:
                first, second = _normed(first, second, k_norm_ptr + pairs, pairs < HALF, eps, HALF)
            key_first, key_second = first * cos - second * sin, second * cos + first * sin
            rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
            _store_cached(k_ptr, k_scales_ptr, rows, pairs, key_first, key_second, heads_mask, mask, HALF, QUANTIZES)
            if HAS_VALUES:
                _store_cached(
                    v_ptr, v_scales_ptr, rows, pairs, value_first, value_second, heads_mask, mask, HALF, QUANTIZES
                )
