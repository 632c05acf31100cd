"""Attention on CPUs against the reference; a row has the same bits alone, in any batch and in any chunks."""

import re
from dataclasses import replace

import pytest
import torch

from kernels.cpu.tile import MAX_ROWS
from kernels.families import cpu_ops, reference_ops
from tests.support.kernels.batches import (
    assert_close,
    assert_same_bits,
    fill_cache,
    make_ragged_batch,
    poison_front,
    read_cache,
)

OPS, REFERENCE = cpu_ops(), reference_ops()
MIXES = {
    "decodes": ([1, 1, 1, 1], [1, 16, 17, 301]),
    "short chunks": ([5, 5, 7], [5, 21, 300]),
    "long chunk": ([129], [129]),
    "chunk of a longer prompt": ([129], [333]),
    "decodes, then chunks": ([1, 1, 5, 129], [40, 333, 77, 257]),
    "block borders": ([1, 1, 1, 15, 16, 17, 16], [15, 16, 17, 15, 16, 17, 32]),
    "step borders": ([1, 1, 1, 31, 32, 33, 32], [31, 32, 33, 31, 32, 33, 64]),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=["fp32", "bf16", "int8"])


def attend(batch, dtype=torch.float32, *, ops=OPS, **options):
    return ops.paged_attention(batch.q, fill_cache(ops, batch, dtype), batch.metadata, scale=batch.scale, **options)


def check(batch, dtype=torch.float32, **options):
    """Compares with the reference on the values that the cache holds."""
    cache = fill_cache(OPS, batch, dtype)
    k, v = zip(*(read_cache(cache, batch.slots(row)) for row in range(len(batch.k))), strict=True)
    expected = attend(replace(batch, k=k, v=v), ops=REFERENCE, **options)
    poison_front(cache, batch, options.get("sliding_window"))
    actual = OPS.paged_attention(batch.q, cache, batch.metadata, scale=batch.scale, **options)
    assert_close(actual, expected)


@pytest.mark.sampled
@DTYPES
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("sliding_window", [None, 1, 13, 16, 33, 100])
def test_paged_attention_equals_reference_on_mix(mix, sliding_window, dtype):
    check(make_ragged_batch(*MIXES[mix]), dtype, sliding_window=sliding_window)


@pytest.mark.sampled
@DTYPES
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("soft_cap", [0.3, 5.0])
def test_soft_caps_equal_reference(mix, soft_cap, dtype):
    """The smaller cap is reached by most scores, the larger one changes few."""
    check(make_ragged_batch(*MIXES[mix]), dtype, sliding_window=100, soft_cap=soft_cap)


@pytest.mark.sampled
@DTYPES
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("sliding_window", [None, 13])
def test_sinks_equal_reference(mix, sliding_window, dtype):
    """Below all scores, between them and above them; the last so far that the result is zero."""
    sinks = torch.tensor([-100.0, 0.5, 6.0, 1000.0], dtype=torch.bfloat16)
    check(make_ragged_batch(*MIXES[mix]), dtype, sliding_window=sliding_window, sinks=sinks)


def test_a_sink_for_each_head_is_required():
    with pytest.raises(ValueError, match=re.escape("sinks have shape [3], there are 4 heads")):
        attend(make_ragged_batch([1], [1]), sinks=torch.zeros(3))


@pytest.mark.sampled
@DTYPES
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_paged_attention_equals_reference_for_group_size(group_size, num_kv_heads, dtype):
    """Includes more query heads per KV head than a tile has rows."""
    shape = {"num_heads": group_size * num_kv_heads, "num_kv_heads": num_kv_heads, "head_dim": 32}
    check(make_ragged_batch([1, 1, 5, 47], [40, 333, 77, 150], **shape), dtype)


def test_one_of_the_group_sizes_exceeds_a_tile():
    assert MAX_ROWS < 16


@pytest.mark.sampled
@DTYPES
@pytest.mark.parametrize("head_dim", [6, 32, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 48, 64])
def test_paged_attention_equals_reference_for_shape(head_dim, block_size, dtype):
    batch = make_ragged_batch([1, 9, 30], [50, 65, 31], head_dim=head_dim, block_size=block_size)
    check(batch, dtype, sliding_window=40)


@pytest.mark.sampled(6)
@DTYPES
@pytest.mark.parametrize("seed", range(30))
def test_paged_attention_equals_reference_on_random_batches(seed, dtype):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    query_lens = [draw(1, 3) if draw(0, 2) else draw(1, 40) for _ in range(draw(1, 9))]
    seq_lens = [query_len + draw(0, 90) for query_len in query_lens]
    batch = make_ragged_batch(query_lens, seq_lens, head_dim=32, block_size=16 * draw(1, 4), seed=seed)
    check(batch, dtype, sliding_window=draw(1, 120))


@pytest.mark.parametrize("num_threads", [2, 5])
def test_more_threads_give_the_bits_of_one(num_threads):
    ops = cpu_ops(num_threads=num_threads)
    for mix in MIXES.values():
        batch = make_ragged_batch(*mix)
        cache = fill_cache(ops, batch)
        want = attend(batch)
        for _ in range(3):  # the threads share the work differently each time
            assert_same_bits(ops.paged_attention(batch.q, cache, batch.metadata, scale=batch.scale), want)


def test_paged_attention_reads_queries_inside_a_fused_projection():
    batch = make_ragged_batch(*MIXES["decodes, then chunks"])
    fused = torch.cat((batch.q, torch.full_like(batch.q, torch.nan)), dim=1)
    q = fused[:, : batch.q.shape[1]]
    assert not q.is_contiguous()
    assert_same_bits(attend(replace(batch, q=q)), attend(batch))


@pytest.mark.sampled
@DTYPES
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"soft_cap": 2.0}, {"has_sinks": True}], ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (3, 128), (16, 32), (2, 80)])
def test_a_row_has_the_same_bits_alone_and_in_any_chunks(num_heads, head_dim, options, dtype):
    """Slots after a chunk hold NaN while it is computed, as they are not written yet."""
    query_lens, seq_lens = [1, 5, 1, 40, 75], [33, 20, 90, 70, 75]
    batch = make_ragged_batch(query_lens, seq_lens, num_heads=num_heads, num_kv_heads=1, head_dim=head_dim)
    if options == {"has_sinks": True}:
        options = {"sinks": torch.linspace(-1, 3, num_heads)}
    together = attend(batch, dtype, **options).split(query_lens)
    for row, query_len in enumerate(query_lens):
        for chunk_len in {1, 3, 13, 32, query_len}:
            for start in range(0, query_len, chunk_len) if chunk_len > 1 else {0, query_len // 2, query_len - 1}:
                stop = min(query_len, start + chunk_len)
                alone = attend(batch.row(row, start, stop), dtype, **options)
                assert_same_bits(alone, together[row][start:stop])


@DTYPES
@pytest.mark.parametrize("what", ["k", "v"])
def test_nan_in_the_cache_stays_in_its_request_and_head(what, dtype):
    batch = make_ragged_batch([1, 1, 20], [50, 50, 50])
    clean = attend(batch, dtype).view(22, 2, 2 * 64)
    getattr(batch, what)[1][17, 0, 5] = torch.nan
    out = attend(batch, dtype).view(22, 2, 2 * 64)  # [tokens, KV heads, ...]
    if what == "v" and dtype is not torch.int8:
        assert out[1, 0].isnan().sum() == 2  # this element of two query heads
    else:
        assert out[1, 0].isnan().all()
    assert_same_bits(out[1, 1], clean[1, 1])
    others = [0, *range(2, 22)]
    assert_same_bits(out[others], clean[others])


def test_nan_in_a_query_stays_in_its_token_and_head():
    batch = make_ragged_batch([1, 20], [50, 50])
    clean = attend(batch).view(21, 4, 64)
    batch.q[7, 2, 3] = torch.nan
    out = attend(batch).view(21, 4, 64)
    assert out[7, 2].isnan().all()
    out[7, 2] = clean[7, 2]
    assert_same_bits(out, clean)


def test_nan_in_a_key_does_not_reach_the_tokens_before_it():
    batch = make_ragged_batch([20], [50])
    clean = attend(batch)
    batch.k[0][40] = torch.nan
    out = attend(batch)
    assert_same_bits(out[:10], clean[:10])
    assert out[10:].isnan().all()


def test_infinite_scores_become_nan():
    batch = make_ragged_batch([1], [40])
    batch.k[0][0] = torch.inf
    assert attend(replace(batch, q=batch.q.abs())).isnan().all()


@DTYPES
def test_scores_far_apart_do_not_overflow(dtype):
    check(replace(make_ragged_batch([3, 1], [40, 40]), scale=500.0), dtype)


def test_falling_and_rising_scores_equal_reference():
    """The maximum is the first score, or changes at every step."""
    batch = make_ragged_batch([1, 1], [300, 300])
    for row, order in enumerate((1, -1)):
        batch.k[row][:] = batch.q[row, :2] * torch.linspace(3, -3, 300)[:, None, None] * order
    check(replace(batch, q=batch.q.view(2, 2, 2, 64)[:, :, :1].expand(-1, -1, 2, -1).reshape(2, 4, 64)))


def test_shapes_that_disagree_are_named():
    batch = make_ragged_batch([1], [4], num_heads=6, num_kv_heads=2, head_dim=32)
    cache = fill_cache(OPS, batch)
    for q, shape in ((batch.q[:, :5], "[1, 5, 32]"), (batch.q[..., :30], "[1, 6, 30]")):
        words = re.escape(f"q {shape} with strides (192, 32, 1) does not fit a cache of 2 heads of 32")
        with pytest.raises(ValueError, match=words):
            OPS.paged_attention(q, cache, batch.metadata, scale=1.0)
    with pytest.raises(ValueError, match=r"q is torch\.float16 on cpu, CPU operations take float32"):
        OPS.paged_attention(batch.q.half(), cache, batch.metadata, scale=1.0)
    endless = replace(batch.metadata, block_table=torch.zeros(1, 140_000, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rows of 2240000 tokens are too long, at most 2\d{6} are supported"):
        OPS.paged_attention(batch.q, cache, endless, scale=1.0)
    with pytest.raises(ValueError, match=f"block_size of the batch is 64, of the cache {batch.metadata.block_size}"):
        OPS.paged_attention(batch.q, cache, replace(batch.metadata, block_size=64), scale=1.0)
    for name in ("query_start_loc", "seq_lens", "block_table"):
        wrong = replace(batch.metadata, **{name: getattr(batch.metadata, name).long()})
        with pytest.raises(ValueError, match=f"{name} is int64 on cpu with strides .*, CPU operations take int32"):
            OPS.paged_attention(batch.q, cache, wrong, scale=1.0)
