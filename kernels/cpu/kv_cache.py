"""Layout of the paged KV cache on CPUs, made for `multiply_tile`.

Keys are in groups of 16 tokens with the tokens innermost, so that one vector holds the same dimension of 16 keys.
Values have their dimensions innermost. A head's part of a block is contiguous, so attention reads it sequentially.
"""

import torch

from kernels.cpu.huge_pages import allocate
from kernels.cpu.tile import LANES
from kernels.kv_cache import PagedKVCache

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
"""Each of another size, by which the kernels know it."""


class CpuKVCache(PagedKVCache):
    """Keys k [num_blocks, num_kv_heads, block_size // 16, head_dim, 16]; fp32, bf16, or int8 with scales."""

    __slots__ = ()

    def _keys(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.k[blocks, :, offsets // LANES, :, offsets % LANES]


def make_kv_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> CpuKVCache:
    """Allocates a cache of zeros: a kernel may multiply an unwritten slot by zero, and 0 * NaN is NaN.

    Raises: ValueError: dtype is none of CACHE_DTYPES, or block_size is no multiple of 16. RuntimeError: out of memory.
    """
    if dtype not in CACHE_DTYPES:
        raise ValueError(f"KV cache dtype is {dtype}, CPU operations have float32, bfloat16 and int8")
    if block_size % LANES:
        raise ValueError(f"block_size is {block_size}, CPU operations take multiples of {LANES}")
    shape = (num_blocks, num_kv_heads, block_size)
    num_elements = num_blocks * num_kv_heads * block_size * head_dim
    # vectors may read past a head whose size is no multiple of four vectors
    values = allocate(num_elements + 4 * LANES, dtype=dtype).zero_()[:num_elements]
    scale_shape = shape if dtype is torch.int8 else (0, num_kv_heads, block_size)
    return CpuKVCache(
        k=allocate(num_blocks, num_kv_heads, block_size // LANES, head_dim, LANES, dtype=dtype).zero_(),
        v=values.view(*shape, head_dim),
        k_scales=torch.zeros(scale_shape),
        v_scales=torch.zeros(scale_shape),
    )
