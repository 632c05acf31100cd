"""Ragged attention in Triton against the reference: mixes of chunks and decodes, padding, and unused memory."""

import re
from dataclasses import replace

import pytest
import torch

from kernels.gpu import tiles
from kernels.gpu.decode_attention import decode_attention
from kernels.gpu.decode_plan import decode_plan
from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.prefill_attention import prefill_attention
from kernels.metadata import AttentionMetadata
from kernels.reference.paged_attention import paged_attention as reference_paged_attention
from tests.support.kernels.batches import assert_close, make_ragged_batch, poison_front, score_error

MIXES = {
    "decodes": ([1, 1, 1, 1], [1, 16, 17, 133]),
    "short chunks": ([5, 5, 7], [5, 21, 100]),
    "long chunk": ([67], [67]),
    "chunk of a longer prompt": ([67], [135]),
    "decodes, then chunks": ([1, 1, 5, 67], [40, 133, 77, 131]),
    "block borders": ([1, 1, 1, 15, 16, 17, 16], [15, 16, 17, 15, 16, 17, 32]),
    "tile borders": ([1, 1, 1, 63, 64, 65], [63, 64, 65, 127, 128, 129]),
}
NUM_PROCESSORS = 132
PREFILL = {"first_row": 0, "num_processors": NUM_PROCESSORS}
DECODE_TILE = tiles.AttentionTile(16, 32, 4, 1)


def make_cache(batch, kv_dtype, device, poison=torch.nan):
    """Returns a GPU cache of the batch's keys and values, and what it stores for each row, in fp32.

    Slots that belong to no row hold `poison`.
    """
    num_kv_heads, head_dim = batch.k[0].shape[1:]
    shape = (batch.num_blocks, num_kv_heads, batch.metadata.block_size)
    is_quantized = kv_dtype.itemsize == 1
    parts = [torch.full((*shape, head_dim), poison).to(kv_dtype) for _ in range(2)]
    scales = [torch.full(shape if is_quantized else (0,), poison) for _ in range(2)]
    stored = [[], []]
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
    return GpuKVCache(*(part.to(device) for part in (*parts, *scales))), stored


def expect(batch, q, stored, **options):
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


def to_device(metadata, device):
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    return replace(metadata, **{name: getattr(metadata, name).to(device) for name in names})


def check(
    batch, device, target, *, dtype=torch.float32, kv_dtype=None, num_one_token_reqs=None, extra_atol=0.0, **options
):
    """Compares a call of `paged_attention` with the reference."""
    query_lens = batch.metadata.query_start_loc.diff().tolist()
    if num_one_token_reqs is None:
        num_one_token_reqs = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    cache, stored = make_cache(batch, kv_dtype or dtype, device)
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


def run_kernel(kernel, q, cache, metadata, device, tile, **options):
    """Calls the decode or the prefill kernel; elements of the result that it does not write are NaN."""
    out = torch.full((len(q), q[0].numel()), torch.nan, device=device)
    options = {"sliding_window": None, "soft_cap": None, "sinks": None, **options}
    on_device = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    kernel(out, q.to(device), cache, to_device(metadata, device), tile=tile, **on_device)
    return out.cpu()


def largest_score(batch):
    """Returns the largest absolute score of any query and key of the same row."""
    rows = zip(batch.q.split(batch.metadata.query_start_loc.diff().tolist()), batch.k, strict=True)
    group_size = batch.q.shape[1] // batch.k[0].shape[1]
    return (
        max(
            float(torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(group_size, 1)).abs().max())
            for q, k in rows
        )
        * batch.scale
    )


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
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.float32), (32, torch.float16), (64, torch.float16)])
def test_paged_attention_equals_reference_for_shape(device, target, head_dim, block_size, dtype):
    batch = make_ragged_batch([1, 9, 30], [150, 65, 131], head_dim=head_dim, block_size=block_size)
    check(batch, device, target, dtype=dtype, sliding_window=90)


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
    return run_kernel(decode_attention, q, cache, metadata, device, DECODE_TILE, plan=plan, **options)


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


def padded(metadata, num_rows):
    """Adds rows of padding: one token, no sequence, and a block table of invalid ids."""

    def grown(tensor, value):
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
        ({"head_dim": 72}, {}, "head_dim is 72, of the cache 72; expected the same multiple of 16 up to 256"),
        ({"head_dim": 272}, {}, "head_dim is 272"),
        ({"num_heads": 3}, {}, "3 heads over 2 KV heads"),
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
