"""Causal attention of a ragged batch over a paged KV cache: one row at a time, keys gathered, mask written out."""

import torch

from kernels.metadata import AttentionMetadata


def paged_attention(
    q: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Computes softmax attention with an explicit mask.

    Args:
        q: [T, num_heads, head_dim].
        kv_cache: keys and values, each [num_blocks, block_size, num_kv_heads, head_dim].
        metadata: the batch; slots past a row's seq_lens are never read.
        scale: softmax scale, usually head_dim ** -0.5.
        sliding_window: a token at position p sees keys max(0, p - sliding_window + 1)..p; None: 0..p.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: they are unchanged.
    Returns: [T, num_heads * head_dim], dtype of q; computed in fp32.
    """
    k_cache, v_cache = kv_cache
    out = torch.empty_like(q)
    group_size = q.shape[1] // k_cache.shape[2]  # query heads per KV head
    query_start_loc = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, stop = query_start_loc[row], query_start_loc[row + 1]
        num_blocks = -(-seq_len // metadata.block_size)
        block_ids = metadata.block_table[row, :num_blocks].long()
        k = k_cache[block_ids].flatten(0, 1)[:seq_len].float().repeat_interleave(group_size, dim=1)
        v = v_cache[block_ids].flatten(0, 1)[:seq_len].float().repeat_interleave(group_size, dim=1)

        key_positions = torch.arange(seq_len, device=q.device)
        query_positions = key_positions[seq_len - (stop - start) :, None]
        visible = key_positions <= query_positions
        if sliding_window is not None:
            visible &= key_positions > query_positions - sliding_window

        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out.flatten(1)
