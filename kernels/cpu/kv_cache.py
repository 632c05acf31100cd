"""Layout of the paged KV cache on CPUs, made for `multiply_tile`.

Keys are in groups of 16 tokens with the tokens innermost, so that one vector holds the same dimension of 16 keys.
Values have their dimensions innermost. A head's part of a block is contiguous, so attention reads it sequentially.
"""

from dataclasses import dataclass

import torch

from kernels.cpu.multiply_tile import LANES


@dataclass(frozen=True, slots=True)
class CpuKVCache:
    """Keys and values of one layer, fp32, or int8 with one scale for each token and head.

    Attributes:
        k: [num_blocks, num_kv_heads, groups, head_dim, 16].
        v: [num_blocks, num_kv_heads, block_size, head_dim].
        k_scales, v_scales: [num_blocks, num_kv_heads, block_size] fp32; empty for fp32 caches.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor

    @property
    def is_int8(self) -> bool:
        """Whether keys and values are quantised."""
        return self.k.dtype is torch.int8

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.v.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.v.shape[1]

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.v.shape[3]

    def read_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads keys and values [n, num_kv_heads, head_dim] fp32 of slots [n] int64. For tests."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        k = self.k[blocks, :, offsets // LANES, :, offsets % LANES].float()
        v = self.v[blocks, :, offsets].float()
        if not self.is_int8:
            return k, v
        return k * self.k_scales[blocks, :, offsets, None], v * self.v_scales[blocks, :, offsets, None]


def make_kv_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> CpuKVCache:
    """Allocates a cache of zeros: a kernel may multiply an unwritten slot by zero, and 0 * NaN is NaN.

    Raises: ValueError: dtype is neither float32 nor int8, or block_size is no multiple of 16. RuntimeError: out of
    memory.
    """
    if dtype not in (torch.float32, torch.int8):
        raise ValueError(f"KV cache dtype is {dtype}, CPU operations have float32 and int8")
    if block_size % LANES:
        raise ValueError(f"block_size is {block_size}, CPU operations take multiples of {LANES}")
    shape = (num_blocks, num_kv_heads, block_size)
    num_elements = num_blocks * num_kv_heads * block_size * head_dim
    # vectors may read past a head whose size is no multiple of four vectors
    values = torch.zeros(num_elements + 4 * LANES, dtype=dtype)[:num_elements]
    scale_shape = shape if dtype is torch.int8 else (0, num_kv_heads, block_size)
    return CpuKVCache(
        k=torch.zeros(num_blocks, num_kv_heads, block_size // LANES, head_dim, LANES, dtype=dtype),
        v=values.view(*shape, head_dim),
        k_scales=torch.zeros(scale_shape),
        v_scales=torch.zeros(scale_shape),
    )
