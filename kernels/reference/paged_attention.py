"""Causal attention of a ragged batch over a paged KV cache: one row at a time, keys gathered, mask written out."""

from collections.abc import Callable

import torch

from kernels.metadata import AttentionMetadata
from kernels.reference.soft_cap import soft_cap as capped

Gather = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Block ids [n] int64 -> keys and values of their tokens, each [n * block_size, num_kv_heads, its size]."""

_MAX_SCORES = 2**25
"""Scores computed at once, so that long prompts over long contexts need 128 MiB of them and not the product."""


def paged_attention(
    q: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes softmax attention with an explicit mask.

    Args:
        q: [T, num_heads, head_dim].
        kv_cache: keys and values, each [num_blocks, block_size, num_kv_heads, its size].
        metadata: the batch; slots past a row's seq_lens are never read.
        scale: softmax scale, usually head_dim ** -0.5.
        sliding_window: a token at position p sees keys max(0, p - sliding_window + 1)..p; None: 0..p.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: they are unchanged.
        sinks: [num_heads], a score of each head that takes part in the softmax and has no value; None: none.
    Returns: [T, num_heads * size of a value], dtype of q; computed in fp32.
    """
    k_cache, v_cache = kv_cache

    def gather(block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k_cache[block_ids].flatten(0, 1), v_cache[block_ids].flatten(0, 1)

    return gathered_attention(
        q,
        gather,
        v_cache.shape[3],
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def gathered_attention(
    q: torch.Tensor,
    gather: Gather,
    value_dim: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `paged_attention` over a cache of any layout.

    Args:
        gather: reads keys and values of blocks.
        value_dim: size of a value.
        q, metadata, scale, sliding_window, soft_cap, sinks: see `paged_attention`.
    Returns: [T, num_heads * size of a value], dtype of q; computed in fp32.
    """
    num_heads = q.shape[1]
    out = q.new_empty(q.shape[0], num_heads, value_dim)
    query_start_loc = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, stop = query_start_loc[row], query_start_loc[row + 1]
        num_blocks = -(-seq_len // metadata.block_size)
        k, v = (part[:seq_len].float() for part in gather(metadata.block_table[row, :num_blocks].long()))
        if sliding_window is not None:  # blocks in front of the window may be of other requests, with any values
            first_key = max(0, seq_len - (stop - start) + 1 - sliding_window)
            k[:first_key], v[:first_key] = 0, 0
        key_positions = torch.arange(seq_len, device=q.device)
        chunk_len = max(1, _MAX_SCORES // max(1, num_heads * seq_len))
        for first in range(start, stop, chunk_len):
            last = min(first + chunk_len, stop)
            query_positions = key_positions[seq_len - (stop - first) : seq_len - (stop - last), None]
            visible = key_positions <= query_positions
            if sliding_window is not None:
                visible &= key_positions > query_positions - sliding_window

            queries = (
                q[first:last].float().reshape(last - first, k.shape[1], -1, q.shape[2])
            )  # heads of one KV head together
            scores = torch.einsum("qhgd,khd->hgqk", queries, k) * scale
            if soft_cap is not None:
                scores = capped(scores, soft_cap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(-1, -1, scores.shape[2], 1)
                scores = torch.cat([scores, sink], dim=-1)
            weights = scores.softmax(dim=-1)[..., :seq_len]
            out[first:last] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2).to(q.dtype)
    return out.flatten(1)
