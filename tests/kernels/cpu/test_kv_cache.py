"""KV cache on CPUs: shapes, contents and rejected parameters."""

import pytest
import torch

from kernels.families import cpu_ops
from tests.support.kernels.batches import cache_tensors

OPS = cpu_ops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_caches_are_zeros_of_the_requested_size(dtype):
    cache = OPS.make_kv_cache(5, 48, 3, 80, dtype)
    assert (cache.block_size, cache.num_kv_heads, cache.head_dim) == (48, 3, 80)
    assert cache.is_quantized == (dtype is torch.int8)
    assert cache.k.numel() == cache.v.numel() == 5 * 48 * 3 * 80
    assert cache.k_scales.numel() == cache.v_scales.numel() == (5 * 48 * 3 if cache.is_quantized else 0)
    assert not any(tensor.any() for tensor in cache_tensors(cache))


def test_unsupported_inputs_of_kernels_are_rejected():
    with pytest.raises(ValueError, match=r"dtype is torch\.float16, CPU operations have float32, bfloat16 and int8"):
        OPS.make_kv_cache(1, 16, 1, 32, torch.float16)
    for block_size in (1, 8, 20):
        with pytest.raises(ValueError, match=f"block_size is {block_size}, CPU operations take multiples of 16"):
            OPS.make_kv_cache(1, block_size, 1, 32, torch.float32)


def test_values_are_stored():
    with pytest.raises(ValueError, match="value_dim is 16: CPU operations store values"):
        OPS.make_kv_cache(1, 16, 1, 32, torch.float32, 16)


def test_out_of_memory_is_a_runtime_error():
    with pytest.raises(RuntimeError):
        OPS.make_kv_cache(2**50, 16, 1, 32, torch.float32)
