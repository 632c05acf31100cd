"""Rotation, norms of heads and the write to the cache, against the reference and against the layout as documented."""

import pytest
import torch

from kernels.families import cpu_ops
from tests.support.kernels.batches import assert_close, assert_same_bits, cache_tensors, read_cache
from tests.support.kernels.rotation import RotationStep

OPS = cpu_ops()
NUM_HEADS, NUM_KV_HEADS = 6, 2


def make_step(num_tokens, head_dim, block_size, *, norms=False):
    return RotationStep(num_tokens, head_dim, heads=(NUM_HEADS, NUM_KV_HEADS), block_size=block_size, norms=norms)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("num_tokens", [1, 5, 33, 79])
@pytest.mark.parametrize(("head_dim", "block_size"), [(6, 16), (32, 48), (80, 16), (128, 32)])
def test_queries_keys_and_values_equal_reference(num_tokens, head_dim, block_size, norms):
    step = make_step(num_tokens, head_dim, block_size, norms=norms)
    (q, cache), (wanted_q, *wanted) = step.run(OPS), step.wanted()
    assert q.shape == (num_tokens, NUM_HEADS, head_dim)
    assert_close(q, wanted_q)
    for actual, expected in zip(read_cache(cache, step.slots), wanted, strict=True):
        assert_close(actual, expected)
    for part in read_cache(cache, step.other_slots):
        assert part.isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 33, 79])
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 48), (80, 16)])
def test_int8_keys_and_values_are_off_by_half_a_step_at_most(num_tokens, head_dim, block_size):
    step = make_step(num_tokens, head_dim, block_size)
    (q, cache), (wanted_q, *wanted) = step.run(OPS, cache_dtype=torch.int8), step.wanted()
    assert_close(q, wanted_q)
    for actual, expected in zip(read_cache(cache, step.slots), wanted, strict=True):
        half_step = expected.abs().amax(dim=-1, keepdim=True) / 254
        assert ((actual - expected).abs() <= half_step * 1.001).all()
        assert_close(actual.abs().amax(dim=-1), expected.abs().amax(dim=-1))  # the largest is exact
    k, v, *scales = cache_tensors(cache)
    assert all(((part == 0x55).sum() >= (len(step.other_slots) * NUM_KV_HEADS * head_dim)) for part in (k, v))
    assert all(part.isnan().sum() == len(step.other_slots) * NUM_KV_HEADS for part in scales)


@pytest.mark.parametrize("num_tokens", [1, 33, 79])
@pytest.mark.parametrize(("head_dim", "block_size"), [(6, 16), (32, 48), (80, 16)])
def test_keys_and_values_in_bf16_are_those_of_fp32_rounded(num_tokens, head_dim, block_size):
    step = make_step(num_tokens, head_dim, block_size)
    (_, exact), (_, cache) = step.run(OPS), step.run(OPS, cache_dtype=torch.bfloat16)
    for actual, expected in zip(read_cache(cache, step.slots), read_cache(exact, step.slots), strict=True):
        assert_same_bits(actual, expected.bfloat16().float())
    for part in read_cache(cache, step.other_slots):
        assert part.isnan().all()


def test_int8_vectors_of_zeros_and_of_tiny_and_huge_values():
    values = torch.tensor([0.0, 1e-38, 1e30, 1.0, -3e38])
    qkv = torch.zeros(5, 3, 32)
    qkv[:, 1:] = values[:, None, None] * torch.linspace(-1, 1, 32)
    cache = OPS.make_kv_cache(1, 16, 1, 32, torch.int8)
    ones = torch.ones(1, 16)
    OPS.rotate_and_store(
        qkv.flatten(1), torch.zeros(5, dtype=torch.int64), ones, torch.zeros_like(ones), cache, torch.arange(5)
    )
    for part in read_cache(cache, torch.arange(5)):
        error = (part[:, 0] - qkv[:, 1]).abs().amax(dim=-1)
        assert (error <= values.abs() / 250 + 1e-30).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_non_finite_values_stay_in_their_head(dtype, bad):
    """int8 has no NaN, so the scale of the vector becomes NaN."""
    step = make_step(7, 32, 16)
    clean_q, clean_cache = step.run(OPS, cache_dtype=dtype)
    clean = read_cache(clean_cache, step.slots)
    step.qkv.view(7, 10, 32)[3, [1, NUM_HEADS, NUM_HEADS + 3], 5] = bad
    q, cache = step.run(OPS, cache_dtype=dtype)
    k, v = read_cache(cache, step.slots)
    for part, before, head in ((q, clean_q, 1), (k, clean[0], 0), (v, clean[1], 1)):
        assert not part[3, head].isfinite().all()
        assert dtype is torch.float32 or part is q or part[3, head].isnan().all()
        part[3, head] = before[3, head]
        assert_same_bits(part, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_token_has_the_same_bits_among_any_number_of_tokens(dtype):
    step = make_step(70, 48, 16, norms=True)
    q, cache = step.run(OPS, cache_dtype=dtype)
    for rows in (slice(0, 1), slice(69, 70), slice(5, 38)):
        alone_q, alone_cache = step.run(OPS, cache_dtype=dtype, rows=rows)
        assert_same_bits(alone_q, q[rows])
        slots = step.slots[rows]
        for alone, together in zip(read_cache(alone_cache, slots), read_cache(cache, slots), strict=True):
            assert_same_bits(alone, together)


def test_errors_name_what_is_wrong():
    cache = OPS.make_kv_cache(1, 16, 2, 8, torch.float32)
    zero, table = torch.tensor([0]), torch.ones(4, 4)

    def run(qkv, cos=table, positions=zero, slots=zero):
        OPS.rotate_and_store(qkv, positions, cos, cos, cache, slots)

    for width in (30, 32):
        with pytest.raises(ValueError, match=rf"qkv \[1, {width}\] does not hold heads of 8, 2 of them keys"):
            run(torch.ones(1, width))
    with pytest.raises(ValueError, match="head_dim is 8, the tables have 3 and 3 pairs"):
        run(torch.ones(1, 40), torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"qkv is torch\.float16 on cpu, CPU operations take float32"):
        run(torch.ones(1, 40).half())
    two = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"qkv has 1 tokens, positions \[2\], slot_mapping \[1\]"):
        run(torch.ones(1, 40), positions=two)
    for slots in (two.int(), torch.zeros(4, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match=r"slot_mapping is int.*, CPU operations take int64 on cpu without gaps"):
            run(torch.ones(2, 40), positions=two, slots=slots)
