"""Paged KV cache of one layer: what the CPU and the GPU family have in common. Each lays out keys for its kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """Keys and values of one layer. In 8 bits each token and head has a scale: dequantized = value * scale.

    Attributes:
        k: keys, in the layout of the family, which has head_dim in the place of a value's size.
        v: values, [num_blocks, num_kv_heads, block_size, value_dim]; shorter than keys, they are part of them.
        k_scales, v_scales: [num_blocks, num_kv_heads, block_size] fp32; empty if k and v are not quantised.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values have 8 bits."""
        return self.v.dtype.itemsize == 1

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
        """Size of a key."""
        return self.k.shape[3]

    @property
    def value_dim(self) -> int:
        """Size of a value; below `head_dim` the values are the first numbers of the keys (latents)."""
        return self.v.shape[3]

    def num_query_heads(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> int:
        """Returns the number of query heads in rows that hold the queries, keys and values of tokens.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], without values if they are part of the keys.
            cos, sin: [max_positions, head_dim // 2].
        Raises: ValueError: qkv, or the tables, do not fit this cache.
        """
        width, head_dim, num_kv_heads = qkv.shape[1], self.head_dim, self.num_kv_heads
        num_heads = width // head_dim - (2 if self.value_dim == head_dim else 1) * num_kv_heads
        if num_heads < 1 or width % head_dim:
            raise ValueError(f"qkv {list(qkv.shape)} does not hold heads of {head_dim}, {num_kv_heads} of them keys")
        if head_dim != 2 * cos.shape[1] or cos.shape != sin.shape:
            raise ValueError(f"head_dim is {head_dim}, the tables have {cos.shape[1]} and {sin.shape[1]} pairs")
        return num_heads

    def read_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads keys and values [n, num_kv_heads, their size] fp32 of slots [n] int64. For tests and benchmarks."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        k, v = self._keys(blocks, offsets).float(), self.v[blocks, :, offsets].float()
        if not self.is_quantized:
            return k, v
        return k * self.k_scales[blocks, :, offsets, None], v * self.v_scales[blocks, :, offsets, None]

    def _keys(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the stored keys [n, num_kv_heads, head_dim] of tokens at these offsets in these blocks."""
        return self.k[blocks, :, offsets]
