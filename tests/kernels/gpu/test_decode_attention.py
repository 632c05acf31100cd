"""Attention of rows of one token in Triton: chunks of keys that are merged, sinks, and padding."""

from dataclasses import replace

import pytest
import torch

from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.decode_plan import decode_plan
from kernels.gpu.tiles import AttentionTile
from tests.support.kernels.batches import assert_close, make_ragged_batch, score_error
from tests.support.kernels.gpu_attention import (
    NUM_PROCESSORS,
    expect,
    largest_score,
    make_cache,
    padded,
    run_kernel,
    to_device,
)

TILE = AttentionTile(16, 32, 4, 1)


def run_decode(q, cache, metadata, device, *, num_processors=NUM_PROCESSORS, **options):
    """Calls the decode kernel on all rows."""
    metadata = to_device(metadata, device)
    options = {"sliding_window": None, **options}
    plan = decode_plan(
        metadata,
        num_rows=metadata.num_reqs,
        num_heads=q.shape[1],
        num_kv_heads=cache.num_kv_heads,
        head_dim=q.shape[2],
        sliding_window=options["sliding_window"],
        num_processors=num_processors,
    )
    return run_kernel(decode_attention, q, cache, metadata, device, TILE, plan=plan, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("num_processors", [1, NUM_PROCESSORS])
@pytest.mark.parametrize("sliding_window", [None, 150])
def test_chunks_of_a_row_are_merged_to_its_attention(device, float8, monkeypatch, num_processors, sliding_window):
    """Rows of one to four chunks of 128 or 256 keys beside each other; chunks are merged two at a time."""
    monkeypatch.setattr("kernels.gpu.decode_attention._CHUNKS_AT_ONCE", 2)
    batch = make_ragged_batch([1] * 5, [1, 400, 128, 129, 300], num_heads=3, num_kv_heads=1, head_dim=80)
    options = {"scale": batch.scale, "sliding_window": sliding_window, "sinks": torch.tensor([-1.0, 2.0, 1000.0])}
    for kv_dtype in (torch.float32, float8):
        cache, stored = make_cache(batch, kv_dtype, device)
        out = run_decode(batch.q, cache, batch.metadata, device, num_processors=num_processors, **options)
        assert_close(out, expect(batch, batch.q, stored, **options))


def test_a_sink_may_be_far_above_the_scores_of_the_chunk_that_adds_it(device):
    """The last of two chunks adds the sink, which is near the scores of the first."""
    batch = make_ragged_batch([1], [256], num_heads=1, num_kv_heads=1)
    (k,) = batch.k
    direction = batch.q[0] / batch.q[0].square().sum() / batch.scale
    k = torch.cat((k[:128] * 0.01 + 60 * direction, k[128:] * 0.01 - 60 * direction))
    batch = replace(batch, k=(k,))
    cache, stored = make_cache(batch, torch.float32, device)
    options = {"scale": batch.scale, "sinks": torch.tensor([62.0])}
    out = run_decode(batch.q, cache, batch.metadata, device, **options)
    extra_atol = score_error(batch.q.shape[2], largest_score(batch))
    assert_close(out, expect(batch, batch.q, stored, **options), extra_atol=extra_atol)


def test_a_long_row_beside_short_ones_equals_reference(device):
    """The long row has several chunks of 256 keys; scores are capped."""
    batch = make_ragged_batch([1] * 4, [20, 1500, 1, 130], num_heads=4, num_kv_heads=1, head_dim=64)
    cache, stored = make_cache(batch, torch.float32, device)
    options = {"scale": batch.scale, "soft_cap": 2.0}
    out = run_decode(batch.q, cache, batch.metadata, device, num_processors=1, **options)
    assert_close(out, expect(batch, batch.q, stored, **options))


def test_padding_does_not_change_a_bit_of_decode_rows(device):
    batch = make_ragged_batch([1] * 3, [40, 700, 133])
    cache, _ = make_cache(batch, torch.float32, device)
    alone = run_decode(batch.q, cache, batch.metadata, device, num_processors=1, scale=batch.scale)
    q, metadata = torch.cat((batch.q, torch.randn(5, 4, 64))), replace(padded(batch.metadata, 5), max_seq_len=10_000)
    out = run_decode(q, cache, metadata, device, num_processors=1, scale=batch.scale)
    assert torch.equal(out[:3], alone)


def test_padded_decode_rows_are_zeros_and_read_nothing(device):
    batch = make_ragged_batch([1, 1], [40, 133])
    cache, stored = make_cache(batch, torch.float32, device)
    q, metadata = torch.cat((batch.q, torch.randn(3, 4, 64))), padded(batch.metadata, 3)
    out = run_decode(q, cache, metadata, device, scale=batch.scale)
    assert_close(out[:2], expect(batch, batch.q, stored, scale=batch.scale))
    assert torch.equal(out[2:], torch.zeros(3, 4 * 64))
