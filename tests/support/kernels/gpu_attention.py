"""Attention in Triton on ragged batches: caches in the layout of a GPU, the reference, and the kernels alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.tiles import AttentionTile
from kernels.metadata import AttentionMetadata
from kernels.reference.paged_attention import paged_attention as reference_paged_attention
from tests.support.kernels.batches import RaggedBatch

NUM_PROCESSORS = 132

Rows = list[list[torch.Tensor]]
"""Keys and values of each row, in fp32, as a cache stores them."""


def make_cache(
    batch: RaggedBatch,
    kv_dtype: torch.dtype,
    device: torch.device,
    poison: float = torch.nan,
    value_dim: int | None = None,
) -> tuple[GpuKVCache, Rows]:
    """Returns a GPU cache of the batch's keys and values, and what it stores for each row, in fp32.

    Slots that belong to no row hold `poison`. With value_dim the values are the first numbers of the keys.
    """
    num_kv_heads, head_dim = batch.k[0].shape[1:]
    shape = (batch.num_blocks, num_kv_heads, batch.metadata.block_size)
    is_quantized = kv_dtype.itemsize == 1
    parts = [torch.full((*shape, head_dim), poison).to(kv_dtype) for _ in range(2)]
    scales = [torch.full(shape if is_quantized else (0,), poison) for _ in range(2)]
    stored: Rows = [[], []]
    for row in range(len(batch.k)):
        slots = batch.slots(row)
        blocks, offsets = slots // batch.metadata.block_size, slots % batch.metadata.block_size
        for i, values in enumerate((batch.k[row], batch.v[row])):
            if is_quantized:
                scale = values.abs().amax(-1) / torch.finfo(kv_dtype).max
                scales[i][blocks, :, offsets] = scale
                values = (values / scale[..., None]).to(kv_dtype)
                parts[i][blocks, :, offsets] = values
                stored[i].append(values.float() * scale[..., None])
            else:
                parts[i][blocks, :, offsets] = values.to(kv_dtype)
                stored[i].append(values.to(kv_dtype).float())
    cache = GpuKVCache(*(part.to(device) for part in (*parts, *scales)))
    if value_dim is not None:
        cache = GpuKVCache(cache.k, cache.k[..., :value_dim], cache.k_scales, cache.k_scales)
        stored[1] = [k[..., :value_dim] for k in stored[0]]
    return cache, stored


def expect(batch: RaggedBatch, q: torch.Tensor, stored: Rows, **options: Any) -> torch.Tensor:
    """Returns the reference in float64 on the stored keys and values."""
    k, v = stored
    rows = []
    for row in range(len(k)):
        start, stop = batch.metadata.query_start_loc[row : row + 2].tolist()
        one = AttentionMetadata(
            query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=torch.tensor([len(k[row])], dtype=torch.int32),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(stop - start, dtype=torch.int64),
            block_size=len(k[row]),
            max_query_len=stop - start,
            max_seq_len=len(k[row]),
        )
        rows.append(reference_paged_attention(q[start:stop].double(), (k[row][None], v[row][None]), one, **options))
    return torch.cat(rows)


def to_device(metadata: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    """Returns a batch whose tensors are on a device."""
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    return replace(metadata, **{name: getattr(metadata, name).to(device) for name in names})


def run_kernel(
    kernel: Callable[..., object],
    q: torch.Tensor,
    cache: GpuKVCache,
    metadata: AttentionMetadata,
    device: torch.device,
    tile: AttentionTile,
    **options: Any,
) -> torch.Tensor:
    """Calls the decode or the prefill kernel; elements of the result that it does not write are NaN."""
    out = torch.full((len(q), q[0].numel()), torch.nan, device=device)
    options = {"sliding_window": None, "soft_cap": None, "sinks": None, **options}
    on_device = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    kernel(out, q.to(device), cache, to_device(metadata, device), tile=tile, **on_device)
    return out.cpu()


def largest_score(batch: RaggedBatch) -> float:
    """Returns the largest absolute score of any query and key of the same row."""
    rows = zip(torch.split(batch.q, batch.metadata.query_start_loc.diff().tolist()), batch.k, strict=True)
    group_size = batch.q.shape[1] // batch.k[0].shape[1]
    return (
        max(
            float(torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(group_size, 1)).abs().max())
            for q, k in rows
        )
        * batch.scale
    )


def padded(metadata: AttentionMetadata, num_rows: int) -> AttentionMetadata:
    """Adds rows of padding: one token, no sequence, and a block table of invalid ids."""

    def grown(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat((tensor, torch.full((num_rows, *tensor.shape[1:]), value, dtype=tensor.dtype)))

    last = int(metadata.query_start_loc[-1])
    starts = torch.arange(last + 1, last + 1 + num_rows, dtype=torch.int32)
    return replace(
        metadata,
        query_start_loc=torch.cat((metadata.query_start_loc, starts)),
        seq_lens=grown(metadata.seq_lens, 0),
        block_table=grown(metadata.block_table, 1 << 30),
        slot_mapping=grown(metadata.slot_mapping, -1),
    )
