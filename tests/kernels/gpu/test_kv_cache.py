"""KV cache on GPUs: shapes, contents and rejected parameters."""

import pytest
import torch

from kernels.gpu.kv_cache import GpuKVCache, make_kv_cache
from kernels.gpu.targets import TARGETS, UnsupportedTargetError
from tests.support.kernels.batches import cache_tensors, poison_cache, read_cache

SM_90 = TARGETS["sm_90"]


def make(dtype, *, block_size=16, target=SM_90):
    return make_kv_cache(3, block_size, 2, 8, dtype, device=torch.device("cpu"), target=target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_new_cache_is_zeros(dtype):
    cache = make(dtype, block_size=32)
    assert cache.k.shape == cache.v.shape == (3, 2, 32, 8)
    assert cache.k.dtype is cache.v.dtype is dtype
    assert (cache.block_size, cache.num_kv_heads, cache.head_dim) == (32, 2, 8)
    assert cache.is_quantized == (dtype is torch.float8_e4m3fn)
    assert cache.k_scales.shape == cache.v_scales.shape == ((3, 2, 32) if cache.is_quantized else (0, 2, 32))
    assert not any(tensor.float().any() for tensor in cache_tensors(cache))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_latents_are_stored_once(dtype):
    """Values are the first numbers of the keys, with their scales."""
    cache = make_kv_cache(3, 16, 2, 48, dtype, 32, device=torch.device("cpu"), target=SM_90)
    assert (cache.head_dim, cache.value_dim) == (48, 32)
    assert cache.v.untyped_storage().data_ptr() == cache.k.untyped_storage().data_ptr()
    assert cache.v_scales is cache.k_scales
    cache.k[1, :, 5] = torch.arange(96.0).view(2, 48).to(dtype)
    cache.k_scales.fill_(0.5)
    k, v = read_cache(cache, torch.tensor([21]))
    assert torch.equal(v, k[..., :32])
    assert v.any()
    ones = torch.ones(1, 24)
    with pytest.raises(ValueError, match="does not hold heads of 48, 2 of them keys"):
        cache.num_query_heads(torch.zeros(1, 2 * 48), ones, ones)
    assert cache.num_query_heads(torch.zeros(1, 3 * 48), ones, ones) == 1


def test_slots_are_read_as_blocks_and_offsets():
    cache = make(torch.float32)
    cache.k[1, :, 5] = torch.arange(16.0).view(2, 8)
    cache.v[2, 1, 15] = 7.0
    k, v = read_cache(cache, torch.tensor([21, 47]))
    assert torch.equal(k, torch.stack((torch.arange(16.0).view(2, 8), torch.zeros(2, 8))))
    assert torch.equal(v[1], torch.stack((torch.zeros(8), torch.full((8,), 7.0))))


def test_quantized_slots_are_read_as_value_times_scale():
    cache = make(torch.float8_e4m3fn)
    cache.k[0, 1, 3] = 2.0
    cache.k_scales[0, 1, 3] = 0.25
    k, v = read_cache(cache, torch.tensor([3]))
    assert torch.equal(k, torch.stack((torch.zeros(8), torch.full((8,), 0.5)))[None])
    assert not v.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_poisoned_cache_holds_no_valid_number(dtype):
    cache = make(dtype)
    poison_cache(cache)
    for part in read_cache(cache, torch.arange(48)):
        assert part.isnan().all()


def test_unsupported_dtypes_and_sizes_are_rejected_by_name():
    with pytest.raises(ValueError, match=r"KV cache dtype is torch\.int8, GPU operations have float32, float16, bfl"):
        make(torch.int8)
    with pytest.raises(ValueError, match="block_size is 48, GPU operations take powers of two from 16 on"):
        make(torch.float16, block_size=48)
    with pytest.raises(UnsupportedTargetError, match="--kv-cache-dtype fp8: sm_80 has no 8-bit floats"):
        make(torch.float8_e4m3fn, target=TARGETS["sm_80"])
    with pytest.raises(ValueError, match=r"float8_e4m3fn, the 8-bit float of gfx942 is torch\.float8_e4m3fnuz"):
        make(torch.float8_e4m3fn, target=TARGETS["gfx942"])
    assert isinstance(make(torch.float8_e4m3fnuz, target=TARGETS["gfx942"]), GpuKVCache)
