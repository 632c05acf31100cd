"""Random inputs of `rotate_and_store`, for the tests of every family."""

from copy import copy

import torch

from kernels.families import reference_ops
from kernels.interface import KernelOps, KVCache
from tests.support.kernels.batches import cache_tensors, poison_cache, read_cache

NUM_BLOCKS, MAX_POSITIONS, EPS = 5, 300, 1e-6


class RotationStep:
    """Random tokens of one step, in random slots of a cache.

    Attributes:
        qkv: [num_tokens + padding, ...] fp32.
        positions, slot_mapping: [num_tokens + padding] int64; rows of padding have slot -1.
        slots, other_slots: the slots of the tokens, and all others of the cache.
    """

    def __init__(
        self,
        num_tokens: int,
        head_dim: int,
        *,
        seed: int = 0,
        heads: tuple[int, int] = (4, 2),
        block_size: int = 16,
        norms: bool = False,
        padding: int = 0,
    ) -> None:
        """heads: query heads and KV heads; norms: with an RMSNorm of each query and key head."""
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        angles = torch.outer(torch.arange(float(MAX_POSITIONS)), 1e4 ** -torch.arange(0, 1, 2 / head_dim))
        self.qkv = torch.randn(num_tokens + padding, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator)
        self.positions = torch.randint(0, MAX_POSITIONS, (num_tokens + padding,), generator=generator)
        slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)
        self.slots, self.other_slots = slots[:num_tokens], slots[num_tokens:]
        self.slot_mapping = torch.cat((self.slots, torch.full((padding,), -1)))
        self._tables = angles.cos(), angles.sin()
        self._shape = NUM_BLOCKS, block_size, num_kv_heads, head_dim
        weights = torch.randn(2, head_dim, generator=generator)
        self._norms = weights if norms else None

    def run(
        self,
        ops: KernelOps,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        rows: slice = slice(None),
    ) -> tuple[torch.Tensor, KVCache]:
        """Returns the rotated queries of some rows, on the CPU, and a cache whose other slots are poisoned."""
        cache = ops.make_kv_cache(*self._shape, cache_dtype or dtype)
        poison_cache(cache)
        device = next(cache_tensors(cache)).device
        cos, sin = (table.to(device) for table in self._tables)
        norms = None if self._norms is None else self._norms.to(device, dtype)
        q = ops.rotate_and_store(
            self.qkv[rows].clone().to(device, dtype),
            self.positions[rows].to(device),
            cos,
            sin,
            cache,
            self.slot_mapping[rows].to(device),
            head_norms=None if norms is None else (norms[0], norms[1]),
            eps=EPS,
        )
        return q.cpu(), cache

    def wanted(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the reference in fp32 on inputs rounded to dtype: queries, and keys and values at `slots`."""
        rounded = copy(self)
        rounded.qkv = self.qkv.to(dtype).float()
        rounded._norms = None if self._norms is None else self._norms.to(dtype).float()
        q, cache = rounded.run(reference_ops(), rows=slice(len(self.slots)))
        k, v = read_cache(cache, self.slots)
        return q, k, v
