"""Writes this step's keys and values into the paged cache."""

import torch

from kernels.cpu.arrays import Array, block_array, check_fp32, flat_rows
from kernels.cpu.jit import kernel


@kernel
def _store(rows: Array, step: int, cache: Array, slot_mapping: Array) -> None:
    block_size, num_heads, head_dim = cache.shape[1], cache.shape[2], cache.shape[3]
    for token in range(slot_mapping.shape[0]):
        block, offset = slot_mapping[token] // block_size, slot_mapping[token] % block_size
        for head in range(num_heads):
            start = token * step + head * head_dim
            cache[block, offset, head] = rows[start : start + head_dim]


def store_kv_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes token i to slot slot_mapping[i] = block_id * block_size + offset.

    Args:
        k, v: [T, num_kv_heads, head_dim] fp32; rows may be apart, as those of a slice of the fused QKV are.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] fp32, contiguous, written in place.
        slot_mapping: [T] int64, no slot twice, none outside of the cache.
    Raises: ValueError: not fp32, shapes disagree, or something that must be contiguous is not.
    """
    check_fp32(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    if k.shape != v.shape or k.shape[1:] != k_cache.shape[2:] or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} do not fit caches {list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    for name, x, cache in (("k_cache", k, k_cache), ("v_cache", v, v_cache)):
        _store(*flat_rows(x), block_array(cache, name), slot_mapping.numpy())
