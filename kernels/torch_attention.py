"""The reference's attention over the caches of the fast families: for what their kernels do not have, slow."""

import torch

from kernels.kv_cache import PagedKVCache
from kernels.metadata import AttentionMetadata
from kernels.reference.paged_attention import gathered_attention


def torch_attention(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `KernelOps.paged_attention` in fp32 on keys and values gathered from the cache."""
    offsets = torch.arange(metadata.block_size, device=q.device)

    def gather(block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_cache.read_slots((block_ids[:, None] * metadata.block_size + offsets).flatten())

    return gathered_attention(
        q,
        gather,
        kv_cache.value_dim,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
