"""Sizes and allocates the tensors of the KV cache; the scheduler assigns the blocks."""

from dataclasses import dataclass

import torch

from engine.errors import ConfigError
from engine.model.model_shape import ModelShape
from kernels.interface import KernelOps, KVCache


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Size of the KV cache.

    Attributes:
        num_blocks: blocks in every layer.
        block_size: tokens per block.
        bytes_per_token: size of one token over all layers.
        max_model_len: most tokens of one request; fits in the cache.
    """

    num_blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Capacity in tokens."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.num_tokens * self.bytes_per_token


def kv_bytes_per_token(shape: ModelShape, dtype: torch.dtype) -> int:
    """Returns the bytes of one token's keys and values over all layers; 8-bit ones have an fp32 scale per head."""
    scale_bytes = 4 if dtype.itemsize == 1 else 0
    return sum(2 * layer.num_kv_heads * (layer.head_dim * dtype.itemsize + scale_bytes) for layer in shape.layers)


def plan_kv_cache(
    shape: ModelShape,
    dtype: torch.dtype,
    block_size: int,
    available_bytes: int,
    max_model_len: int | None,
    num_blocks_override: int | None = None,
) -> KVCachePlan:
    """Fits the cache into a memory budget.

    Args:
        shape: of the rank's shard.
        dtype: dtype of keys and values.
        block_size: tokens per block.
        available_bytes: memory for the cache.
        max_model_len: requested length, which must fit; None: the model's context length, reduced to what fits.
        num_blocks_override: number of blocks; overrides available_bytes.
    Raises: ConfigError: not even one request of max_model_len fits, or the model has no positions for it.
    """
    bytes_per_token = kv_bytes_per_token(shape, dtype)
    num_blocks = num_blocks_override
    if num_blocks is None:
        num_blocks = max(0, available_bytes) // (bytes_per_token * block_size)
    num_tokens = num_blocks * block_size
    wanted = shape.max_position_embeddings if max_model_len is None else max_model_len
    if wanted > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {wanted}, the model has {shape.max_position_embeddings} positions "
            "(max_position_embeddings): lower it"
        )
    if num_tokens < wanted and (max_model_len is not None or num_tokens == 0):
        held_bytes = num_tokens * bytes_per_token if num_blocks_override is not None else max(0, available_bytes)
        raise ConfigError(
            f"KV cache is too small: one request of max_model_len {wanted} tokens needs "
            f"{_amount(wanted * bytes_per_token)} ({bytes_per_token} bytes per token), "
            f"{_amount(held_bytes)} is available, enough for a max_model_len of {num_tokens}. "
            "Lower --max-model-len, or give the cache more memory"
        )
    return KVCachePlan(num_blocks, block_size, bytes_per_token, min(wanted, num_tokens))


def allocate_kv_caches(plan: KVCachePlan, shape: ModelShape, dtype: torch.dtype, ops: KernelOps) -> list[KVCache]:
    """Allocates keys and values of each layer, in the layout of the operations.

    Raises: ConfigError: out of memory.
    """
    try:
        return [
            ops.make_kv_cache(plan.num_blocks, plan.block_size, layer.num_kv_heads, layer.head_dim, dtype)
            for layer in shape.layers
        ]
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
