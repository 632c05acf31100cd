"""Sizes and allocates the tensors of the KV cache; the scheduler assigns the blocks."""

from collections import Counter
from dataclasses import dataclass, replace

import torch

from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.errors import ConfigError
from engine.model.model_shape import ModelShape
from kernels.interface import KernelOps, KVCache

SNAPSHOT_SHARE = 0.25
"""Most of the cache's memory that snapshots of states take; the rest is for keys and values."""


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Size of the KV cache.

    Attributes:
        num_blocks: blocks in every layer.
        block_size: tokens per block.
        bytes_per_token: size of one token in a block, over the layers of the largest group.
        max_model_len: most tokens of one request; fits in the cache.
        groups: how layers share block tables.
        step_tokens: most tokens of all steps in flight; needed with windows.
        num_snapshots: copies of requests' states besides keys and values, with which prefixes are reused.
        bytes_per_snapshot: size of one.
    """

    num_blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int
    groups: CacheGroups = ONE_GROUP
    step_tokens: int = 0
    num_snapshots: int = 0
    bytes_per_snapshot: int = 0

    @property
    def num_tokens(self) -> int:
        """Capacity in tokens of all layers; of requests longer than a window it is larger."""
        return self.num_blocks // self.groups.num_groups * self.block_size

    @property
    def num_bytes(self) -> int:
        """Size in bytes, of keys and values and of snapshots."""
        return self.num_blocks * self.block_size * self.bytes_per_token + self.snapshot_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Size of the snapshots in bytes."""
        return self.num_snapshots * self.bytes_per_snapshot

    @property
    def num_longest_requests(self) -> float:
        """How many requests of `max_model_len` tokens the cache holds at once."""
        if not self.groups.num_windowed:
            return self.num_tokens / self.max_model_len
        return self.num_blocks / self.groups.most_blocks(self.max_model_len, self.step_tokens, self.block_size)

    def fitting(self, num_tokens: int) -> int:
        """Returns this number, or the tokens of the longest request that fits if these are fewer."""
        longest = self.groups.longest(self.num_blocks, self.step_tokens, self.block_size)
        return num_tokens if longest is None else min(num_tokens, longest)


def kv_bytes_per_token(shape: ModelShape, dtype: torch.dtype) -> int:
    """Returns the bytes of one token's keys and values over the layers of the largest group."""
    num_bytes: Counter[int] = Counter()
    for layer in shape.layers:
        num_bytes[layer.group] += layer.kv_bytes(dtype.itemsize)
    return max(num_bytes.values())


def plan_kv_cache(
    shape: ModelShape,
    dtype: torch.dtype,
    block_size: int,
    available_bytes: int,
    max_model_len: int | None,
    num_blocks_override: int | None = None,
    *,
    step_tokens: int = 0,
    max_snapshots: int = 0,
) -> KVCachePlan:
    """Fits the cache into a memory budget.

    Args:
        shape: of the rank's shard.
        dtype: dtype of keys and values.
        block_size: tokens per block.
        available_bytes: memory for the cache.
        max_model_len: requested length, which must fit; None: the model's context length, reduced to what fits.
        num_blocks_override: number of blocks; overrides available_bytes.
        step_tokens: most tokens of all steps in flight.
        max_snapshots: most snapshots of states; they take at most `SNAPSHOT_SHARE` of the memory, and none if the model
            keeps no states, or has windows.
    Raises: ConfigError: not even one request of max_model_len fits, or the model has no positions for it.
    """
    bytes_per_token = kv_bytes_per_token(shape, dtype)
    bytes_per_block = bytes_per_token * block_size
    total_bytes = float(max(0, available_bytes))
    if num_blocks_override is not None:
        total_bytes = num_blocks_override * bytes_per_block / (1 - SNAPSHOT_SHARE)
    num_snapshots = 0
    if shape.state_bytes and not shape.cache_groups.num_windowed:
        num_snapshots = min(max_snapshots, int(total_bytes * SNAPSHOT_SHARE) // shape.state_bytes)
    num_blocks = num_blocks_override
    if num_blocks is None:
        num_blocks = (max(0, available_bytes) - num_snapshots * shape.state_bytes) // bytes_per_block
    wanted = shape.max_position_embeddings if max_model_len is None else max_model_len
    if wanted > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {wanted}, the model has {shape.max_position_embeddings} positions "
            "(max_position_embeddings): lower it"
        )
    plan = KVCachePlan(
        num_blocks,
        block_size,
        bytes_per_token,
        wanted,
        shape.cache_groups,
        step_tokens,
        num_snapshots,
        shape.state_bytes,
    )
    fitting = plan.fitting(wanted)
    if fitting < wanted and (max_model_len is not None or fitting == 0):
        held_bytes = plan.num_bytes if num_blocks_override is not None else max(0, available_bytes)
        needed_bytes = wanted * bytes_per_token
        if plan.groups.num_windowed:
            needed_bytes = plan.groups.most_blocks(wanted, step_tokens, block_size) * block_size * bytes_per_token
        raise ConfigError(
            f"KV cache is too small: one request of max_model_len {wanted} tokens needs "
            f"{_amount(needed_bytes)} ({plan.groups.num_groups * bytes_per_token} bytes per token), "
            f"{_amount(held_bytes)} is available, enough for a max_model_len of {fitting}. "
            "Lower --max-model-len, or give the cache more memory"
        )
    return replace(plan, max_model_len=fitting)


def allocate_kv_caches(plan: KVCachePlan, shape: ModelShape, dtype: torch.dtype, ops: KernelOps) -> list[KVCache]:
    """Allocates keys and values, in the layout of the operations.

    Returns: those of each layer. The first layers of all groups share memory, and so do the second ones and so on:
    a request has different blocks of them.
    Raises: ConfigError: out of memory.
    """
    num_before: Counter[int] = Counter()
    places = []
    for layer in shape.layers:
        places.append(num_before[layer.group])
        num_before[layer.group] += 1
    shapes = dict(zip(places, shape.layers, strict=True))  # layers of one place have the same heads
    try:
        caches = [
            ops.make_kv_cache(
                plan.num_blocks, plan.block_size, layer.num_kv_heads, layer.head_dim, dtype, layer.value_dim
            )
            for _, layer in sorted(shapes.items())
        ]
        return [caches[place] for place in places]
    except RuntimeError as error:
        raise ConfigError(
            f"KV cache of {_amount(plan.num_bytes)} ({plan.num_blocks} blocks) cannot be allocated: {error}"
        ) from error


def _amount(num_bytes: int) -> str:
    """Formats bytes in the largest unit that gives at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"
