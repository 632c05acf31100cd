"""The reference attention against PyTorch's with explicit masks."""

import pytest
import torch

from kernels.families import reference_ops
from kernels.reference.paged_attention import paged_attention
from tests.support.kernels.batches import assert_close, fill_cache, make_ragged_batch, poison_front

MIX = ([1, 5, 129, 1, 33], [1, 5, 200, 77, 33])


@pytest.mark.parametrize("sliding_window", [None, 1, 16, 50, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
def test_paged_attention_equals_sdpa_row_by_row(num_heads, num_kv_heads, sliding_window):
    query_lens, seq_lens = MIX
    batch = make_ragged_batch(query_lens, seq_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=32)
    cache = fill_cache(reference_ops(), batch)
    poison_front(cache, batch, sliding_window)
    out = paged_attention(batch.q, cache, batch.metadata, scale=batch.scale, sliding_window=sliding_window)
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        mask = torch.zeros(query_len, seq_len, dtype=torch.bool)
        for i in range(query_len):
            position = seq_len - query_len + i
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            mask[i, first : position + 1] = True
        expected = torch.nn.functional.scaled_dot_product_attention(
            batch.q[start : start + query_len].transpose(0, 1),
            batch.k[row].transpose(0, 1),
            batch.v[row].transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        ).transpose(0, 1)
        assert_close(out[start : start + query_len], expected.flatten(1))
        start += query_len
    assert start == out.shape[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_paged_attention_computes_in_fp32(dtype):
    batch = make_ragged_batch(*MIX)
    q, k_cache, v_cache = (x.to(dtype) for x in (batch.q, *fill_cache(reference_ops(), batch)))
    out = paged_attention(q, (k_cache, v_cache), batch.metadata, scale=batch.scale)
    exact = paged_attention(q.double(), (k_cache.double(), v_cache.double()), batch.metadata, scale=batch.scale)
    assert out.dtype is dtype
    torch.testing.assert_close(out, exact.to(dtype), atol=1e-6, rtol=torch.finfo(dtype).eps)  # one rounding
