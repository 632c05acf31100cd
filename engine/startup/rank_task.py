"""Finds out, without loading anything, what every rank of a machine has to build."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.flags import StepLimits
from engine.model.lora import LoraAdapter
from engine.parallel.group import SingleRank
from engine.runner.kv_cache import KVCachePlan, kv_bytes_per_token, plan_kv_cache
from engine.startup.adapters import adapters_bytes
from engine.startup.cpu_memory import bytes_beside_states, bytes_beside_weights, check_cache_fits, kv_cache_bytes
from engine.startup.device import kept_weights, kv_cache_dtype
from engine.startup.gpu import Gpu
from engine.startup.served_model import ServedModel, bytes_of_weights, check_weights_of, shard_shape, weights_dtype
from kernels.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class RankTask:
    """Input of `engine.startup.rank.build_rank`, the same for every rank of a machine.

    Attributes:
        model_dir: folder of the checkpoint.
        model: configuration of the whole model.
        dtype: dtype of weights and activations.
        kv_dtype: dtype of the cache; on a GPU float8 stands for the GPU's own variant.
        kv_plan: cache of one rank, of which other machines may have less memory; None: sized by the free memory of the
            GPU.
        limits: limits of a step.
        num_threads: CPU threads of one rank.
        adapters: adapters of the model.
        gpu: see `build_engine`.
    """

    config: EngineConfig
    model_dir: Path
    model: ServedModel
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_plan: KVCachePlan | None
    limits: StepLimits
    num_threads: int
    adapters: tuple[LoraAdapter, ...] = ()
    gpu: Gpu | None = None

    @property
    def measures_memory(self) -> bool:
        """Whether the cache gets what a step of all ranks leaves of a GPU's memory."""
        config = self.config
        is_given = config.kv_cache_memory_bytes is not None or config.num_gpu_blocks_override is not None
        return self.kv_plan is None and not is_given


def make_task(
    config: EngineConfig,
    device: torch.device,
    model_dir: Path,
    model: ServedModel,
    num_threads: int,
    *,
    adapters: tuple[LoraAdapter, ...] = (),
    gpu: Gpu | None = None,
) -> RankTask:
    """Checks files and memory, and on a CPU sizes the cache, before kernels are compiled: that may take a minute.

    Args:
        config: the engine's configuration.
        device: of the first rank of this machine.
        model_dir, model: the checkpoint.
        num_threads, adapters, gpu: see `RankTask`.
    Raises: CheckpointError, ConfigError: the model's files, a flag or the memory: what to change, with numbers.
    """
    is_cpu = device.type == "cpu"
    limits = config.step_limits(device.type)
    dtype = weights_dtype(model, model_dir, config, device)
    kv_dtype = kv_cache_dtype(config, torch.float32 if is_cpu else dtype)
    kv_plan = _plan_of_cpu(config, model_dir, model, dtype, kv_dtype, limits, adapters) if is_cpu else None
    return RankTask(config, model_dir, model, dtype, kv_dtype, kv_plan, limits, num_threads, adapters, gpu)


def _plan_of_cpu(
    config: EngineConfig,
    model_dir: Path,
    model: ServedModel,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    limits: StepLimits,
    adapters: tuple[LoraAdapter, ...],
) -> KVCachePlan:
    layout = config.layout
    size, num_stages = layout.tensor_size, layout.num_stages
    stages = [SingleRank(0, size, stage, num_stages) for stage in layout.stages_of(config.node_rank)]
    kept = kept_weights(config, "cpu")
    num_bytes = adapters_bytes(config, model, adapters)
    if config.load_format != "dummy":
        check_weights_of(model, model_dir, dtype, stages[0])
    for stage in stages:
        num_bytes += size * bytes_of_weights(model, dtype, stage, config.quantization, kept=kept, is_compact=True)
    free_bytes = bytes_beside_weights(num_bytes, config.quantization or dtype_name(dtype))
    shards = [shard_shape(model, stage) for stage in stages]
    free_bytes = bytes_beside_states(size * sum(shard.state_bytes for shard in shards), limits, free_bytes)
    free_bytes //= layout.ranks_per_node
    shard = max(shards, key=lambda shape: kv_bytes_per_token(shape, kv_dtype))
    shard = replace(shard, state_bytes=max(shape.state_bytes for shape in shards))
    plan = plan_kv_cache(
        shard,
        kv_dtype,
        config.block_size,
        kv_cache_bytes(config, shard, kv_dtype, limits, free_bytes),
        config.max_model_len,
        config.num_gpu_blocks_override,
        step_tokens=config.max_tokens_in_flight("cpu"),
        max_snapshots=config.max_state_snapshots("cpu"),
    )
    check_cache_fits(config, plan, free_bytes)
    return plan
