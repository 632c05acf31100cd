"""Layout of the paged KV cache on GPUs: tokens of a block and head are adjacent, as tiles of attention read them."""

from dataclasses import dataclass

import torch

from kernels.gpu.targets import Target

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True, slots=True)
class GpuKVCache:
    """Keys and values of one layer. In 8 bits each token and head has a scale: dequantized = value * scale.

    Attributes:
        k, v: [num_blocks, num_kv_heads, block_size, head_dim].
        k_scales, v_scales: [num_blocks, num_kv_heads, block_size] fp32; empty if k and v are not quantised.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are 8-bit floats."""
        return self.k.dtype in _FLOAT8_DTYPES

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.k.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.k.shape[3]

    def read_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads keys and values [n, num_kv_heads, head_dim] fp32 of slots [n] int64. For tests."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        k, v = self.k[blocks, :, offsets].float(), self.v[blocks, :, offsets].float()
        if not self.is_quantized:
            return k, v
        return k * self.k_scales[blocks, :, offsets, None], v * self.v_scales[blocks, :, offsets, None]


def make_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
    target: Target,
) -> GpuKVCache:
    """Allocates a cache of zeros: a kernel may multiply an unwritten slot by zero, and 0 * NaN is NaN.

    Args:
        num_blocks, num_kv_heads, head_dim: shape.
        block_size: a power of two from 16 on.
        dtype: fp32, fp16, bf16, or the target's 8-bit float.
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
    return GpuKVCache(
        k=torch.zeros(*shape, head_dim, dtype=dtype, device=device),
        v=torch.zeros(*shape, head_dim, dtype=dtype, device=device),
        k_scales=torch.zeros(scales_shape, device=device),
        v_scales=torch.zeros(scales_shape, device=device),
    )
