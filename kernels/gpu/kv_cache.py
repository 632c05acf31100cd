"""Layout of the paged KV cache on GPUs: the tokens of a block and head are adjacent, for tiles of attention."""

import torch

from kernels.gpu.targets import Target
from kernels.kv_cache import PagedKVCache

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class GpuKVCache(PagedKVCache):
    """Keys k [num_blocks, num_kv_heads, block_size, head_dim] have the layout of the values.

    Latents are stored once: the values are then the first numbers of the keys, in the same memory.
    """

    __slots__ = ()


def make_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
    *,
    device: torch.device,
    target: Target,
) -> GpuKVCache:
    """Allocates a cache of zeros: a kernel may multiply an unwritten slot by zero, and 0 * NaN is NaN.

    Args:
        num_blocks, num_kv_heads, head_dim: shape.
        block_size: a power of two from 16 on.
        dtype: fp32, fp16, bf16, or the target's 8-bit float.
        value_dim: the values are the first numbers of the keys, so many; None: they are stored, as long as keys.
        device: device of the memory.
        target: architecture of the device.
    Raises: ValueError: unsupported dtype or block size. UnsupportedTargetError: the target has no 8-bit floats.
        RuntimeError: out of memory.
    """
    if dtype in _FLOAT8_DTYPES:
        if dtype is not target.require_fp8("--kv-cache-dtype fp8"):
            raise ValueError(f"KV cache dtype is {dtype}, the 8-bit float of {target.name} is {target.fp8_dtype}")
    elif dtype not in _DTYPES:
        raise ValueError(f"KV cache dtype is {dtype}, GPU operations have float32, float16, bfloat16 and float8")
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size is {block_size}, GPU operations take powers of two from 16 on")
    shape = (num_blocks, num_kv_heads, block_size)
    scales_shape = shape if dtype in _FLOAT8_DTYPES else (0, *shape[1:])
    k, k_scales = torch.zeros(*shape, head_dim, dtype=dtype, device=device), torch.zeros(scales_shape, device=device)
    if value_dim is not None:
        return GpuKVCache(k, k[..., :value_dim], k_scales, k_scales)
    return GpuKVCache(k, torch.zeros_like(k), k_scales, torch.zeros_like(k_scales))
