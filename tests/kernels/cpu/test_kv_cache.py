"""Memory for keys and values."""

import pytest
import torch

from kernels.families import cpu_ops
from tests.support.kernels.batches import cache_tensors

OPS = cpu_ops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_caches_are_zeros_of_the_size_asked_for(dtype):
    cache = OPS.make_kv_cache(5, 48, 3, 80, dtype)
    assert (cache.block_size, cache.num_kv_heads, cache.head_dim) == (48, 3, 80)
    assert cache.is_int8 == (dtype is torch.int8)
    assert cache.k.numel() == cache.v.numel() == 5 * 48 * 3 * 80
    assert cache.k_scales.numel() == cache.v_scales.numel() == (5 * 48 * 3 if cache.is_int8 else 0)
    assert not any(tensor.any() for tensor in cache_tensors(cache))


def test_what_the_kernels_do_not_have_is_refused():
    with pytest.raises(ValueError, match=r"KV cache dtype is torch\.float16, CPU operations have float32 and int8"):
        OPS.make_kv_cache(1, 16, 1, 32, torch.float16)
    for block_size in (1, 8, 20):
        with pytest.raises(ValueError, match=f"block_size is {block_size}, CPU operations take multiples of 16"):
            OPS.make_kv_cache(1, block_size, 1, 32, torch.float32)


def test_memory_that_cannot_be_had_is_a_runtime_error():
    with pytest.raises(RuntimeError):
        OPS.make_kv_cache(2**50, 16, 1, 32, torch.float32)
