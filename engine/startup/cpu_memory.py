"""Computes the size of the KV cache on a CPU."""

import logging

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flags import StepLimits
from engine.model.model_shape import ModelShape
from engine.runner.kv_cache import KVCachePlan, kv_bytes_per_token
from engine.startup.machine import available_memory_bytes

# Fraction of the memory beside the weights that the cache takes by default. The rest is for activations and other
# processes.
CACHE_SHARE = 0.5
CACHE_MAX_BYTES = 4 * 2**30

_GIB = 2**30

_log = logging.getLogger(__name__)


def bytes_beside_weights(num_weights_bytes: int, number_format: str) -> int:
    """Returns the memory left once the weights are loaded.

    Raises: ConfigError: the weights do not fit.
    """
    available_bytes = available_memory_bytes()
    _log.info(
        "Available memory: %.2f GiB, weights: %.2f GiB in %s",
        available_bytes / _GIB,
        num_weights_bytes / _GIB,
        number_format,
    )
    if num_weights_bytes > available_bytes:
        raise ConfigError(
            f"the weights take {num_weights_bytes / _GIB:.4f} GiB in {number_format}, "
            f"{available_bytes / _GIB:.4f} GiB of memory is free: serve a smaller --model, or free memory"
        )
    return available_bytes - num_weights_bytes


def bytes_beside_states(state_bytes: int, limits: StepLimits, free_bytes: int) -> int:
    """Returns the memory left for the KV cache beside what layers keep of each request besides keys and values.

    Args:
        state_bytes: what the layers of this machine keep of one request.
        limits: limits of a step.
        free_bytes: memory left beside the weights.

    Raises: ConfigError: the state of max_num_seqs requests does not fit.
    """
    num_bytes = limits.max_num_seqs * state_bytes
    if num_bytes > free_bytes:
        raise ConfigError(
            f"--max-num-seqs {limits.max_num_seqs}: the model's layers keep {state_bytes / 2**20:.4g} MiB of "
            f"each request besides keys and values, {_gib(num_bytes)} in all, and the weights leave "
            f"{_gib(free_bytes)} of memory: lower it"
        )
    return free_bytes - num_bytes


def kv_cache_bytes(
    config: EngineConfig, shape: ModelShape, kv_dtype: torch.dtype, limits: StepLimits, free_bytes: int
) -> int:
    """Returns the bytes for one rank's cache: those of the flag, or by default `CACHE_SHARE` of the free memory.

    The default is at most `CACHE_MAX_BYTES`, and at most what `max_num_seqs` requests and copies of states can fill.

    Args:
        config: the engine's configuration.
        shape: of the rank's shard.
        kv_dtype: dtype of keys and values.
        limits: limits of a step.
        free_bytes: memory left for this rank beside the weights.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    max_model_len = config.max_model_len or shape.max_position_embeddings
    step_tokens = config.max_tokens_in_flight("cpu")
    blocks_per_request = shape.cache_groups.most_blocks(max_model_len, step_tokens, config.block_size)
    most_bytes = limits.max_num_seqs * blocks_per_request * config.block_size * kv_bytes_per_token(shape, kv_dtype)
    most_bytes += config.max_state_snapshots("cpu") * shape.state_bytes
    return min(int(free_bytes * CACHE_SHARE), CACHE_MAX_BYTES, most_bytes)


def check_cache_fits(config: EngineConfig, plan: KVCachePlan, free_bytes: int) -> None:
    """Checks a size that a flag asks for.

    Raises: ConfigError: it exceeds the memory left for this rank beside the weights.
    """
    if plan.num_bytes > free_bytes:
        flag = f"--num-gpu-blocks-override {config.num_gpu_blocks_override}"
        if config.num_gpu_blocks_override is None:
            flag = f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
        raise ConfigError(
            f"{flag} is {_gib(plan.num_bytes)}, the weights leave {_gib(free_bytes)} of the memory that is free: "
            "lower it"
        )


def _gib(num_bytes: int) -> str:
    gib = num_bytes / _GIB
    return f"{gib:.4g} GiB" if gib < 1000 else f"{gib:,.0f} GiB"
