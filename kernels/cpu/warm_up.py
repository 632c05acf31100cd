"""Compiles the kernels of a model's layers, or loads them from the cache on disk, before anyone waits for them.

Sampling is not among them: the engine's own warm-up serves requests that use all of it.
"""

import numba
import torch

from kernels.cpu import paged_attention as attention
from kernels.cpu.rms_norm import add_rms_norm, rms_norm
from kernels.cpu.rotary_embedding import rotary_embedding
from kernels.cpu.silu_and_mul import silu_and_mul
from kernels.cpu.store_kv_cache import store_kv_cache
from kernels.metadata import AttentionMetadata

_HEAD_DIM = 64


def warm_up() -> None:
    """Calls every kernel once, on one token and on enough for all threads: 15 s the first time, then under one."""
    for num_tokens in (1, _num_tokens_for_all_threads()):
        x = torch.ones(num_tokens, _HEAD_DIM)
        heads, cache = x[:, None], torch.ones(1, num_tokens, 1, _HEAD_DIM)
        positions, table = torch.arange(num_tokens), torch.ones(num_tokens, _HEAD_DIM // 2)
        add_rms_norm(rms_norm(x, x[0], 1e-6), x, x[0], 1e-6)
        silu_and_mul(x)
        rotary_embedding(heads, heads, positions, table, table)
        store_kv_cache(heads, heads, cache, cache, positions)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=positions,
            block_size=num_tokens,
            max_query_len=num_tokens,
            max_seq_len=num_tokens,
        )
        attention.paged_attention(heads, cache, cache, metadata, scale=1.0)


def _num_tokens_for_all_threads() -> int:
    """A square number of multiply-adds above the threshold, if there is more than one thread at all."""
    if numba.get_num_threads() == 1:
        return 2
    return int((2 * attention.PARALLEL_COST / _HEAD_DIM) ** 0.5) + attention.QUERY_TILE
