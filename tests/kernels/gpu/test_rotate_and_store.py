"""Rotation, norms of heads and the write to the paged cache, against the reference in fp32."""

import pytest
import torch

from kernels.gpu.kv_cache import make_kv_cache
from kernels.gpu.ops import GpuOps
from kernels.gpu.rotate_and_store import rotate_and_store
from kernels.gpu.targets import TARGETS
from tests.support.kernels.batches import assert_close, assert_quantized, cache_tensors, read_cache
from tests.support.kernels.rotation import RotationStep

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def ops_for(device, cache_dtype):
    """Returns the operations of a GPU that has this cache dtype."""
    return GpuOps(device, TARGETS["gfx942" if cache_dtype is torch.float8_e4m3fnuz else "sm_90"], num_processors=132)


def run(step, device, dtype, cache_dtype, **options):
    return step.run(ops_for(device, cache_dtype), dtype, cache_dtype, **options)


def assert_all_equal(step, device, dtype, cache_dtype):
    q, cache = run(step, device, dtype, cache_dtype)
    wanted_q, *wanted = step.wanted(dtype)
    num_tokens = len(step.slots)
    assert q.dtype is dtype
    assert q.is_contiguous()
    assert_close(q[:num_tokens], wanted_q)
    assert q.isfinite().all()
    for actual, expected in zip(read_cache(cache, step.slots.to(device)), wanted, strict=True):
        compare = assert_quantized if cache_dtype.itemsize == 1 else assert_close
        compare(actual.cpu(), expected, cache_dtype)
    for part in read_cache(cache, step.other_slots.to(device)):
        assert part.isnan().all()
    return cache


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
def test_every_head_size_equals_reference(device, seed, head_dim, norms, dtype):
    assert_all_equal(RotationStep(5, head_dim, norms=norms, seed=seed), device, dtype, dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (14, 2), (32, 8), (28, 4), (5, 5)])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_every_group_size_equals_reference(device, seed, num_tokens, heads):
    assert_all_equal(
        RotationStep(num_tokens, 64, heads=heads, norms=True, seed=seed), device, torch.bfloat16, torch.bfloat16
    )


@pytest.mark.sampled
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_every_block_size_equals_reference(device, seed, block_size):
    assert_all_equal(RotationStep(12, 6, block_size=block_size, seed=seed), device, torch.float32, torch.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 80), (torch.float32, 96)])
def test_8_bit_caches_have_a_scale_for_each_token_and_head(device, seed, float8, dtype, head_dim, norms):
    step = RotationStep(9, head_dim, norms=norms, seed=seed)
    cache = assert_all_equal(step, device, dtype, float8)
    _, *wanted = step.wanted(dtype)
    blocks, offsets = (step.slots // 16).to(device), (step.slots % 16).to(device)
    for scales, exact in zip((cache.k_scales, cache.v_scales), wanted, strict=True):
        largest = exact.abs().amax(dim=-1) / torch.finfo(float8).max
        torch.testing.assert_close(scales[blocks, :, offsets].cpu(), largest, atol=0, rtol=1e-5)


def test_a_cache_may_have_another_dtype(device, seed):
    assert_all_equal(RotationStep(5, 64, seed=seed), device, torch.float32, torch.bfloat16)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_of_padding_are_not_written(device, seed, cache_dtype):
    assert_all_equal(RotationStep(3, 64, norms=True, padding=5, seed=seed), device, torch.bfloat16, cache_dtype)
    nothing = RotationStep(0, 64, padding=2, seed=seed)
    nothing.qkv.zero_()
    _, cache = run(nothing, device, torch.bfloat16, cache_dtype)
    for tensor in cache_tensors(cache):
        assert tensor.float().isnan().all()


def test_heads_of_zeros_are_zeros_in_8_bits(device):
    step = RotationStep(2, 64)
    step.qkv.zero_()
    q, cache = run(step, device, torch.float32, torch.float8_e4m3fn)
    assert not q.any()
    for part in read_cache(cache, step.slots.to(device)):
        assert not part.any()


@pytest.mark.sampled
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn])
def test_nan_stays_in_its_head(device, seed, cache_dtype):
    step = RotationStep(4, 64, seed=seed)
    clean_q, cache = run(step, device, torch.float32, cache_dtype)
    clean = read_cache(cache, step.slots.to(device))
    step.qkv.view(4, 8, 64)[3, [1, 4, 7], 5] = torch.nan  # a query, the first key, the last value
    q, cache = run(step, device, torch.float32, cache_dtype)
    k, v = read_cache(cache, step.slots.to(device))
    for part, before, head in ((q, clean_q, 1), (k, clean[0], 0), (v, clean[1], 1)):
        assert part[3, head].isnan().any()
        part[3, head] = before[3, head]
        assert torch.equal(part, before)


@pytest.mark.sampled
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_token_has_the_same_bits_among_any_number_of_tokens(device, seed, cache_dtype):
    step = RotationStep(8, 80, norms=True, seed=seed)
    q, cache = run(step, device, torch.bfloat16, cache_dtype)
    together = read_cache(cache, step.slots.to(device))
    alone_q, cache = run(step, device, torch.bfloat16, cache_dtype, rows=slice(4, 6))
    assert torch.equal(alone_q, q[4:6])
    for alone, all_tokens in zip(read_cache(cache, step.slots[4:6].to(device)), together, strict=True):
        assert torch.equal(alone, all_tokens[4:6])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_columns_of_wider_rows_have_the_bits_of_whole_rows(device, seed, norms, dtype):
    """As a projection has them whose other columns gate the result."""
    step = RotationStep(5, 64, norms=norms, padding=2, seed=seed)
    ops = ops_for(device, dtype)
    q, cache = step.run(ops, dtype, dtype)
    rotate = ops.rotate_and_store

    def rotate_columns(qkv, *args, **options):
        wider = torch.full((len(qkv), qkv.shape[1] + 48), torch.nan, dtype=dtype, device=device)
        columns = wider[:, 32:-16]
        columns.copy_(qkv)
        out = rotate(columns, *args, **options)
        assert wider[:, :32].isnan().all()
        assert wider[:, -16:].isnan().all()
        return out

    ops.rotate_and_store = rotate_columns
    columns_q, columns_cache = step.run(ops, dtype, dtype)
    assert torch.equal(columns_q, q)
    assert columns_q.is_contiguous()
    for actual, expected in zip(
        read_cache(columns_cache, step.slots.to(device)), read_cache(cache, step.slots.to(device)), strict=True
    ):
        assert torch.equal(actual, expected)


def test_empty_batch_gives_no_tokens(device):
    q, _ = run(RotationStep(0, 64), device, torch.float32, torch.float32)
    assert q.shape == (0, 4, 64)


def test_errors_name_what_is_wrong(device):
    cache = make_kv_cache(1, 16, 2, 8, torch.float32, device=device, target=TARGETS["sm_90"])
    zero, table = torch.tensor([0], device=device), torch.ones(4, 4, device=device)

    def run(width, cos=table, positions=zero):
        qkv = torch.ones(1, width, device=device)
        rotate_and_store(qkv, positions, cos, cos, cache, zero, target=TARGETS["sm_90"])

    with pytest.raises(ValueError, match=r"qkv has shape \[1, 40\], strides \(80, 2\); expected columns of rows"):
        rotate_and_store(table.new_ones(1, 80)[:, ::2], zero, table, table, cache, zero, target=TARGETS["sm_90"])
    for width in (30, 32):
        with pytest.raises(ValueError, match=rf"qkv \[1, {width}\] does not hold heads of 8, 2 of them keys"):
            run(width)
    with pytest.raises(ValueError, match="head_dim is 8, the tables have 3 and 3 pairs"):
        run(40, torch.ones(4, 3, device=device))
    with pytest.raises(ValueError, match=r"qkv has 1 tokens, positions \[2\], slot_mapping \[1\]"):
        run(40, positions=zero.expand(2))
