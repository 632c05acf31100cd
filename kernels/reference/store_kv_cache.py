"""Writes this step's keys and values into the paged cache."""

import torch


def store_kv_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes token i to slot slot_mapping[i] = block_id * block_size + offset.

    Args:
        k, v: [T, num_kv_heads, head_dim].
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], written in place.
        slot_mapping: [T] int64, no slot twice.
    """
    k_cache.flatten(0, 1)[slot_mapping] = k.to(k_cache.dtype)
    v_cache.flatten(0, 1)[slot_mapping] = v.to(v_cache.dtype)
