"""What is compiled when: once, at load."""

import pytest
import torch

from kernels.cpu import paged_attention, rms_norm, rotary_embedding, silu_and_mul, store_kv_cache
from kernels.cpu.warm_up import warm_up
from kernels.ops import cpu_ops
from kernels.testing import make_ragged_batch

MODULES = [paged_attention, rms_norm, rotary_embedding, silu_and_mul, store_kv_cache]


def num_compiled():
    """Kernel -> how many argument types it has been compiled for."""
    return {
        f"{module.__name__}.{name}": len(value.signatures)
        for module in MODULES
        for name, value in vars(module).items()
        if hasattr(value, "signatures")
    }


@pytest.mark.parametrize("num_threads", [1, 2])
def test_layers_compile_nothing_after_warm_up(num_threads, monkeypatch):
    monkeypatch.setattr(paged_attention.numba, "get_num_threads", lambda: num_threads)
    warm_up()
    before = num_compiled()
    assert before["kernels.cpu.paged_attention._attend_share"] > 0
    assert num_threads == 1 or before["kernels.cpu.paged_attention._attend_parallel"] > 0
    ops = cpu_ops()
    for query_lens, seq_lens in (([1], [1]), ([1, 1], [20, 400]), ([3, 200], [3, 300])):
        batch = make_ragged_batch(query_lens, seq_lens, num_heads=8)
        num_tokens = sum(query_lens)
        qkv = torch.randn(num_tokens, 12, 64)
        q, k, v = qkv.tensor_split((8, 10), dim=1)
        table = torch.ones(500, 32)
        q, k = ops.rms_norm(q, torch.ones(64), 1e-6), ops.rms_norm(k, torch.ones(64), 1e-6)
        for queries in (q, qkv[:, :8]):
            ops.rotary_embedding(queries, k, torch.arange(num_tokens), table, table)
            ops.store_kv_cache(k, v, batch.k_cache, batch.v_cache, batch.metadata.slot_mapping)
            ops.paged_attention(queries, batch.k_cache, batch.v_cache, batch.metadata, scale=1.0, sliding_window=40)
        x = torch.randn(num_tokens, 128)
        ops.silu_and_mul(x)
        ops.add_rms_norm(ops.rms_norm(x, x[0], 1e-6), x, x[0], 1e-6)
    assert num_compiled() == before
