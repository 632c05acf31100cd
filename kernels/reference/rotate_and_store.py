"""Rotary position embedding (arXiv:2104.09864, half-split layout), then the write of keys and values to the cache."""

import torch

from kernels.reference.rms_norm import rms_norm


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    *,
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norms and rotates queries and keys, and writes keys and values to the cache.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], or columns of wider rows; without values if those of the
            cache are shorter than keys, and part of them.
        positions: [T] int64, rows of the tables.
        cos, sin: [max_positions, head_dim // 2], fp32.
        kv_cache: keys and values, [num_blocks, block_size, num_kv_heads, head_dim], written in place.
        slot_mapping: [T] int64, no slot twice.
        head_norms: of query and key heads, [head_dim] each.
        eps: added to the mean square in these norms.
    Returns: rotated queries [T, num_heads, head_dim].
    """
    k_cache, v_cache = kv_cache
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    has_values = v_cache.shape[3] == head_dim
    num_heads = heads.shape[1] - (2 if has_values else 1) * num_kv_heads
    q, k, v = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    if head_norms is not None:
        q, k = rms_norm(q, head_norms[0], eps), rms_norm(k, head_norms[1], eps)
    q, k = (_rotated(x, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)) for x in (q, k))
    k_cache.flatten(0, 1)[slot_mapping] = k.to(k_cache.dtype)
    if has_values:
        v_cache.flatten(0, 1)[slot_mapping] = v.to(v_cache.dtype)
    return q


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [T, heads, head_dim]; cos, sin [T, 1, head_dim // 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
