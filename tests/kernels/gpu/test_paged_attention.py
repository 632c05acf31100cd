"""Ragged attention in Triton against the reference: mixes of chunks and decodes, padding, and unused memory."""

import re
from dataclasses import replace

import pytest
import torch

from kernels.gpu import tiles
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.prefill_attention import prefill_attention
from kernels.gpu.targets import UnsupportedTargetError
from tests.support.kernels.batches import assert_close, make_ragged_batch, poison_front, score_error
from tests.support.kernels.gpu_attention import (
    NUM_PROCESSORS,
    expect,
    largest_score,
    make_cache,
    padded,
    run_kernel,
    to_device,
)

MIXES = {
    "decodes": ([1, 1, 1, 1], [1, 16, 17, 133]),
    "short chunks": ([5, 5, 7], [5, 21, 100]),
    "long chunk": ([67], [67]),
    "chunk of a longer prompt": ([67], [135]),
    "decodes, then chunks": ([1, 1, 5, 67], [40, 133, 77, 131]),
    "block borders": ([1, 1, 1, 15, 16, 17, 16], [15, 16, 17, 15, 16, 17, 32]),
    "tile borders": ([1, 1, 1, 63, 64, 65], [63, 64, 65, 127, 128, 129]),
}
PREFILL = {"first_row": 0, "num_processors": NUM_PROCESSORS}


def check(
    batch,
    device,
    target,
    *,
    dtype=torch.float32,
    kv_dtype=None,
    value_dim=None,
    num_one_token_reqs=None,
    extra_atol=0.0,
    **options,
):
    """Compares a call of `paged_attention` with the reference."""
    query_lens = batch.metadata.query_start_loc.diff().tolist()
    if num_one_token_reqs is None:
        num_one_token_reqs = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    cache, stored = make_cache(batch, kv_dtype or dtype, device, value_dim=value_dim)
    poison_front(cache, batch, options.get("sliding_window"))
    q = batch.q.to(dtype)
    actual = paged_attention(
        q.to(device),
        cache,
        to_device(replace(batch.metadata, num_one_token_reqs=num_one_token_reqs), device),
        scale=batch.scale,
        target=target,
        num_processors=NUM_PROCESSORS,
        **options,
    )
    assert actual.dtype is dtype
    assert_close(actual.cpu(), expect(batch, q, stored, scale=batch.scale, **options), extra_atol=extra_atol)


@pytest.mark.sampled
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("sliding_window", [None, 1, 16, 33, 100])
def test_paged_attention_equals_reference_on_mix(device, target, mix, sliding_window):
    check(make_ragged_batch(*MIXES[mix]), device, target, sliding_window=sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 33])
def test_batch_invariant_attention_equals_reference(device, target, sliding_window):
    batch = make_ragged_batch(*MIXES["decodes, then chunks"])
    cache, stored = make_cache(batch, torch.float32, device)
    options = {"scale": batch.scale, "sliding_window": sliding_window}
    actual = paged_attention(
        batch.q.to(device),
        cache,
        to_device(batch.metadata, device),
        target=target,
        num_processors=NUM_PROCESSORS,
        batch_invariant=True,
        **options,
    )
    assert_close(actual.cpu(), expect(batch, batch.q, stored, **options))


@pytest.mark.sampled
@pytest.mark.parametrize("mix", ["decodes, then chunks", "tile borders"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_paged_attention_equals_reference_in_16_bits(device, target, seed, mix, dtype):
    check(make_ragged_batch(*MIXES[mix], seed=seed), device, target, dtype=dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sliding_window", [None, 33])
def test_paged_attention_applies_the_scales_of_an_8_bit_cache(device, target, float8, seed, dtype, sliding_window):
    batch = make_ragged_batch(*MIXES["decodes, then chunks"], seed=seed)
    check(batch, device, target, dtype=dtype, kv_dtype=float8, sliding_window=sliding_window)


@pytest.mark.sampled
@pytest.mark.parametrize("group_size", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_paged_attention_equals_reference_for_group_size(device, target, group_size, dtype):
    shape = {"num_heads": 2 * group_size, "num_kv_heads": 2}
    check(make_ragged_batch([1, 5, 19], [40, 33, 70], **shape), device, target, dtype=dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256, 320, 512])
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.float32), (32, torch.float16), (64, torch.float16)])
def test_paged_attention_equals_reference_for_shape(device, target, head_dim, block_size, dtype):
    batch = make_ragged_batch([1, 9, 30], [150, 65, 131], head_dim=head_dim, block_size=block_size)
    check(batch, device, target, dtype=dtype, sliding_window=90)


@pytest.mark.sampled
@pytest.mark.parametrize("group_size", [17, 129])
def test_more_heads_per_kv_head_than_a_tile_holds_are_several_tiles(device, target, group_size):
    shape = {"num_heads": 2 * group_size, "num_kv_heads": 2, "head_dim": 272 if group_size == 17 else 16}
    check(make_ragged_batch([1, 5], [40, 33], **shape), device, target)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "group_size"),
    [(80, 48, 40), (288, 256, 1), (288, 256, 40), (576, 512, 16), (576, 512, 20), (576, 512, 128)],
)
def test_values_may_be_the_first_numbers_of_the_keys(device, target, dtype, head_dim, value_dim, group_size):
    """Latents as of DeepSeek-V3 and MiniCPM3, and sizes that are no powers of two."""
    shape = {"num_heads": group_size, "num_kv_heads": 1, "head_dim": head_dim}
    check(make_ragged_batch([1, 1, 5], [40, 133, 33], **shape), device, target, dtype=dtype, value_dim=value_dim)


def test_tokens_behind_a_long_prefix_of_latents_are_divided_by_keys(device, target):
    shape = {"num_heads": 36, "num_kv_heads": 2, "head_dim": 160, "block_size": 64}
    check(make_ragged_batch([1, 3], [300, 1100], **shape), device, target, dtype=torch.float16, value_dim=144)


@pytest.mark.parametrize("group_size", [4, 20])
def test_latents_may_have_8_bits(device, target, float8, group_size):
    batch = make_ragged_batch([1, 1, 19], [40, 133, 70], num_heads=group_size, num_kv_heads=1, head_dim=288)
    check(batch, device, target, dtype=torch.bfloat16, kv_dtype=float8, value_dim=256)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block_size", [32, 64, 128, 256])
def test_paged_attention_equals_reference_where_keys_of_a_step_share_a_block(device, target, float8, block_size):
    batch = make_ragged_batch([1, 40], [7, 270], block_size=block_size, num_heads=3, num_kv_heads=1)
    check(batch, device, target, dtype=torch.float16)
    check(batch, device, target, dtype=torch.float16, kv_dtype=float8, sliding_window=70)


@pytest.mark.sampled
@pytest.mark.parametrize("soft_cap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("sliding_window", [None, 20])
def test_paged_attention_caps_scores(device, target, soft_cap, sliding_window):
    batch = make_ragged_batch([1, 1, 9, 40], [40, 133, 77, 150])
    batch = replace(batch, q=4 * batch.q)  # scores that the cap changes; rounding errors grow with them
    extra_atol = score_error(batch.q.shape[2], largest_score(batch), soft_cap)
    assert extra_atol < 2e-5
    check(batch, device, target, soft_cap=soft_cap, sliding_window=sliding_window, extra_atol=extra_atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "batch-invariant"])
def test_sinks_take_part_in_the_softmax(device, target, dtype, sliding_window, batch_invariant):
    """Below all scores, between them and above them; the last so far that the result is zero."""
    batch = make_ragged_batch([1, 1, 9, 40], [40, 133, 77, 150])
    cache, stored = make_cache(batch, dtype, device)
    q, sinks = batch.q.to(dtype), torch.tensor([-100.0, 0.5, 6.0, 1000.0], dtype=dtype)
    options = {"scale": batch.scale, "sliding_window": sliding_window}
    metadata = to_device(replace(batch.metadata, num_one_token_reqs=2), device)
    machine = {"target": target, "num_processors": NUM_PROCESSORS, "batch_invariant": batch_invariant}
    out = paged_attention(q.to(device), cache, metadata, sinks=sinks.to(device), **options, **machine)
    assert_close(out.cpu(), expect(batch, q, stored, sinks=sinks, **options))


def test_a_soft_cap_makes_a_difference(device, target):
    """The scores of the test above are large enough for the cap to change them."""
    batch = make_ragged_batch([1, 9], [40, 77])
    batch = replace(batch, q=4 * batch.q)
    _, stored = make_cache(batch, torch.float32, device)
    plain, capped = (expect(batch, batch.q, stored, scale=batch.scale, soft_cap=cap) for cap in (None, 3.0))
    assert (plain - capped).abs().max() > 0.1


@pytest.mark.parametrize("num_one_token_reqs", [0, 1, 2, 3])
def test_one_token_rows_may_go_to_either_kernel(device, target, num_one_token_reqs):
    batch = make_ragged_batch([1, 1, 1, 9], [1, 133, 64, 77])
    check(batch, device, target, num_one_token_reqs=num_one_token_reqs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch_index", range(12))
def test_random_batches_equal_reference(device, target, seed, batch_index):
    generator = torch.Generator().manual_seed(seed + batch_index)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    query_lens = [1] * draw(0, 4) + [draw(1, 60) for _ in range(draw(1, 5))]
    seq_lens = [query_len + draw(0, 90) for query_len in query_lens]
    batch = make_ragged_batch(
        query_lens,
        seq_lens,
        num_heads=2 * draw(1, 5),
        head_dim=16 * draw(1, 5),
        block_size=16 << draw(0, 3),
        seed=seed + batch_index,
    )
    check(batch, device, target, sliding_window=draw(1, 120) if draw(0, 2) else None)


@pytest.mark.parametrize("sliding_window", [None, 8])
def test_padded_rows_of_a_mixed_step_are_zeros_and_read_nothing(device, sliding_window):
    batch = make_ragged_batch([5, 35], [40, 67])
    cache, stored = make_cache(batch, torch.float32, device)
    q, metadata = torch.cat((batch.q, torch.randn(3, 4, 64))), padded(batch.metadata, 3)
    options = {"scale": batch.scale, "sliding_window": sliding_window}
    tile = tiles.AttentionTile(32, 16, 4, 1)
    out = run_kernel(prefill_attention, q, cache, metadata, device, tile, **PREFILL, **options)
    assert_close(out[:40], expect(batch, batch.q, stored, **options))
    assert torch.equal(out[40:], torch.zeros(3, 4 * 64))


PREFIXED = {
    "whole": {},
    "window": {"sliding_window": 700},
    "window, soft cap": {"sliding_window": 700, "soft_cap": 3.0},
    "fp8": {"kv_dtype": True},
    "sinks": {"sinks": torch.tensor([-1.0, 2.0, 1000.0])},
    "window, fp8": {"sliding_window": 700, "kv_dtype": True},
    # the first chunk has keys that only some tokens of the tile see
    "window, sinks": {"sliding_window": 1088, "sinks": torch.tensor([-1.0, 2.0, 4.0])},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PREFIXED)
def test_a_few_tokens_behind_a_prefix_are_divided_by_keys(device, float8, name):
    """Beside a row of one unit of keys, a whole prompt and padding; groups of 3 leave a row of each tile unused."""
    options = dict(PREFIXED[name])
    kv_dtype = float8 if options.pop("kv_dtype", False) else torch.float32
    lens = ([7, 3, 4, 1], [1600, 40, 4, 1029])
    batch = make_ragged_batch(*lens, num_heads=3, num_kv_heads=1, head_dim=80, block_size=64)
    cache, stored = make_cache(batch, kv_dtype, device)
    options = {"scale": batch.scale, **options}
    tile = tiles.AttentionTile(16, 32, 4, 1)
    q, metadata = torch.cat((batch.q, torch.randn(2, 3, 80))), to_device(padded(batch.metadata, 2), device)
    out = run_kernel(prefill_attention, q, cache, metadata, device, tile, **PREFILL, **options)
    assert_close(out[:15], expect(batch, batch.q, stored, **options))
    assert torch.equal(out[15:], torch.zeros(2, 3 * 80))


@pytest.mark.slow
def test_more_rows_than_are_searched_at_once(device, monkeypatch):
    """150 rows find their tokens, searching 64 rows at a time."""
    monkeypatch.setattr("kernels.gpu.prefill_attention.ROWS_AT_ONCE", 64)
    monkeypatch.setattr("kernels.gpu.prefill_plan.ROWS_AT_ONCE", 64)
    num_rows = 150
    batch = make_ragged_batch([1] * num_rows, [1 + i % 3 for i in range(num_rows)], head_dim=16, num_heads=2)
    cache, stored = make_cache(batch, torch.float32, device)
    tile = tiles.AttentionTile(16, 16, 4, 1)
    out = run_kernel(prefill_attention, batch.q, cache, batch.metadata, device, tile, **PREFILL, scale=batch.scale)
    assert_close(out, expect(batch, batch.q, stored, scale=batch.scale))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # of the interpreter's maximum
def test_nan_row_does_not_affect_other_rows(device, target):
    batch = make_ragged_batch([1, 1, 9, 5], [40, 133, 77, 150])
    clean, _ = make_cache(batch, torch.float32, device)
    options = {"scale": batch.scale, "target": target, "num_processors": NUM_PROCESSORS}
    metadata = to_device(replace(batch.metadata, num_one_token_reqs=2), device)
    expected = paged_attention(batch.q.to(device), clean, metadata, **options)
    q = batch.q.clone()
    q[1], q[4] = torch.nan, torch.nan
    actual = paged_attention(q.to(device), clean, metadata, **options)
    is_nan = torch.zeros(len(q), dtype=torch.bool)
    is_nan[[1, 4]] = True
    assert actual[is_nan].isnan().all()
    assert torch.equal(actual[~is_nan], expected[~is_nan])


def test_queries_may_be_part_of_a_wider_tensor(device, target):
    batch = make_ragged_batch([1, 9], [40, 77])
    cache, _ = make_cache(batch, torch.float32, device)
    options = {"scale": batch.scale, "target": target, "num_processors": NUM_PROCESSORS}
    metadata = to_device(batch.metadata, device)
    qkv = torch.cat((batch.q, torch.full((10, 4, 64), torch.nan)), dim=1).to(device)
    actual = paged_attention(qkv[:, :4], cache, metadata, **options)
    assert torch.equal(actual, paged_attention(batch.q.to(device), cache, metadata, **options))


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ({"num_heads": 3}, {}, "3 heads of 64, the cache has 2 of 64; expected a multiple of the same size"),
        ({"block_size": 48}, {}, "block_size is 48, of the batch 48; expected the same power of two from 16 on"),
        ({}, {"scale": -1.0}, "scale -1.0, sliding_window None, soft_cap None: expected positive numbers or None"),
        ({}, {"sliding_window": 0}, "sliding_window 0"),
        ({}, {"soft_cap": 0.0}, "soft_cap 0.0"),
    ],
)
def test_unsupported_shapes_are_rejected_with_their_numbers(device, target, shape, changes, message):
    batch = make_ragged_batch([5], [21], **shape)
    cache, _ = make_cache(batch, torch.float32, device)
    options = {"scale": batch.scale, "target": target, "num_processors": NUM_PROCESSORS, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attention(batch.q.to(device), cache, to_device(batch.metadata, device), **options)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"head_dim": 72}, "heads of a multiple of 16 up to 512, these have 72: use --attention-backend torch"),
        ({"head_dim": 528}, "these have 528: use --attention-backend torch"),
    ],
)
def test_heads_without_kernels_are_errors_of_the_model_and_name_another_attention(device, target, shape, message):
    batch = make_ragged_batch([5], [21], **shape)
    cache, _ = make_cache(batch, torch.float32, device)
    options = {"scale": batch.scale, "target": target, "num_processors": NUM_PROCESSORS}
    with pytest.raises(UnsupportedTargetError, match=message):
        paged_attention(batch.q.to(device), cache, to_device(batch.metadata, device), **options)


def test_queries_of_another_layout_are_rejected(device, target):
    batch = make_ragged_batch([5], [21])
    cache, _ = make_cache(batch, torch.float32, device)
    metadata = to_device(batch.metadata, device)
    q = batch.q.to(device)
    options = {"scale": batch.scale, "target": target, "num_processors": NUM_PROCESSORS}
    with pytest.raises(ValueError, match=r"q has strides \(256, 1, 4\)"):
        paged_attention(q.flatten(1).view(5, 64, 4).transpose(1, 2), cache, metadata, **options)
    with pytest.raises(ValueError, match=r"queries are torch\.float64"):
        paged_attention(q.double(), cache, metadata, **options)
