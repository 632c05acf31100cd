"""Ragged attention over the paged KV cache: prefill chunks and decodes in one call, over two kernels.

Rows of one query token are bound by memory, rows of several by matrix products, so each kind has its own kernel. This
module only divides the rows between the two.
"""

import torch

from kernels.gpu import tiles
from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.decode_plan import decode_plan
from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.launch import is_compile_only
from kernels.gpu.prefill_attention import prefill_attention
from kernels.gpu.targets import Target, UnsupportedTargetError
from kernels.metadata import AttentionMetadata

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INSTEAD = "use --attention-backend torch, which is slower"


def paged_attention(
    q: torch.Tensor,
    kv_cache: GpuKVCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    target: Target,
    num_processors: int,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Computes causal attention of a ragged batch, query heads of one KV head together (GQA, arXiv:2305.13245).

    Method: online softmax (FlashAttention-2, arXiv:2307.08691) over blocks (PagedAttention, arXiv:2309.06180), split
    over the keys (Flash-Decoding) where queries do not fill the device. Sums are fp32; keys, values and probabilities
    enter products in the dtype of q. Launches depend on shapes and on the metadata's host numbers only. Rows of padding
    become zeros.

    Args:
        q: [T, num_heads, head_dim] fp32, fp16 or bf16, a token's heads contiguous.
        kv_cache: contiguous; fp32, fp16, bf16, or the target's 8-bit float with scales. Its values have a multiple of
            16 numbers up to 512 and are as long as keys, or the first numbers of the keys (latents).
        metadata: the batch; its first num_one_token_reqs rows, or all if max_query_len is 1, go to the decode kernel.
        scale: softmax scale, positive.
        sliding_window: a token at position p sees keys max(0, p - sliding_window + 1)..p; None: 0..p.
        soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118); None: they are unchanged.
        sinks: [num_heads], a score of each head without a value, which takes part in the softmax
            (arXiv:2309.17453); None: none.
        target: architecture of the device; decides the tiles.
        num_processors: multiprocessors of the device; they decide the length of chunks of keys.
        out: [T, num_heads * size of a value], contiguous, dtype of q, for the result; None: it is allocated.
        batch_invariant: all rows go to the prefill kernel, whose order of summation then is the same for a token that
            is decoded, in a chunk, or behind a cached prefix.
    Returns: [T, num_heads * size of a value], dtype of q; tokens behind those of the last row are not written.

    Raises:
        ValueError: shapes or dtypes disagree or are not supported.
        UnsupportedTargetError: there are no kernels for these heads.
    """
    _check(q, kv_cache, metadata, scale, sliding_window, soft_cap, sinks)
    num_tokens, num_heads, _ = q.shape
    value_dim, group_size = kv_cache.value_dim, num_heads // kv_cache.num_kv_heads
    shape = (target, value_dim, 8 * q.itemsize, 8 * kv_cache.k.itemsize, group_size)
    if out is None:
        out = torch.empty((num_tokens, num_heads * value_dim), dtype=q.dtype, device=q.device)

    def decode(num_rows: int) -> None:
        decode_attention(
            out,
            q,
            kv_cache,
            metadata,
            plan=decode_plan(
                metadata,
                num_rows=num_rows,
                num_heads=num_heads,
                num_kv_heads=kv_cache.num_kv_heads * tiles.head_tiles(value_dim, group_size),
                head_dim=value_dim,
                sliding_window=sliding_window,
                num_processors=num_processors,
            ),
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            tile=tiles.decode_tile(*shape),
        )

    def prefill(first_row: int) -> None:
        prefill_attention(
            out,
            q,
            kv_cache,
            metadata,
            first_row=first_row,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            tile=tiles.prefill_tile(*shape, batch_invariant=batch_invariant),
            num_processors=num_processors,
            batch_invariant=batch_invariant,
        )

    if batch_invariant:
        prefill(0)
        return out
    if is_compile_only():  # other batches may need kernels that this one does not
        decode(1)
        prefill(0)
        return out
    num_decodes = metadata.num_reqs if metadata.max_query_len == 1 else metadata.num_one_token_reqs
    if num_decodes > 0:
        decode(num_decodes)
    if num_decodes < metadata.num_reqs:
        prefill(num_decodes)
    return out


def _check(
    q: torch.Tensor,
    kv_cache: GpuKVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, cached_head_dim = kv_cache.k.shape
    value_dim = kv_cache.value_dim
    if head_dim != cached_head_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} heads of {head_dim}, the cache has {num_kv_heads} of {cached_head_dim}; expected a multiple "
            "of the same size"
        )
    if not tiles.has_kernels(value_dim):
        raise UnsupportedTargetError(
            f"the attention kernels of a GPU take heads of a multiple of 16 up to {tiles.MAX_HEAD_DIM}, these have "
            f"{value_dim}: {_INSTEAD}"
        )
    if block_size != metadata.block_size or block_size < 16 or block_size & (block_size - 1):
        raise ValueError(
            f"block_size is {block_size}, of the batch {metadata.block_size}; expected the same power of two from 16 on"
        )
    if q.dtype not in _DTYPES:
        raise ValueError(f"queries are {q.dtype}; expected float32, float16 or bfloat16")
    if q.stride(2) != 1 or (num_heads > 1 and q.stride(1) != head_dim) or q.stride(0) % 16:
        raise ValueError(
            f"q has strides {q.stride()}; expected {(head_dim, 1)} in a token, tokens a multiple of 16 apart"
        )
    if not (kv_cache.k.is_contiguous() and (value_dim < head_dim or kv_cache.v.is_contiguous())):
        raise ValueError("the cache is not contiguous")
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.stride() != (1,)):
        raise ValueError(
            f"sinks have shape {list(sinks.shape)}, strides {sinks.stride()}; expected [{num_heads}], (1,)"
        )
    if scale <= 0 or (sliding_window is not None and sliding_window < 1) or (soft_cap is not None and soft_cap <= 0):
        raise ValueError(
            f"scale {scale}, sliding_window {sliding_window}, soft_cap {soft_cap}: expected positive numbers or None"
        )
