"""One GPU of this machine: whether it can be used, what it is, and how the memory beside the weights is divided."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.core.config import SchedulerConfig
from engine.errors import ConfigError
from engine.gpu_memory import GpuMemory, MemoryUse, graphs_bytes
from engine.interfaces import ModelRunner
from engine.runner.buckets import decode_buckets
from engine.runner.kv_cache import KVCachePlan
from engine.warm_up import run_largest_step
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import Target, UnsupportedTargetError, target_of

MakeRunner = Callable[[KVCachePlan, Sequence[int]], ModelRunner]
"""(size of the cache, batch sizes to record) -> a runner of the loaded model."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that there are kernels for.

    Attributes:
        num_processors: its multiprocessors.
        memory: what of it was free when it was opened.
    """

    device: torch.device
    target: Target
    num_processors: int
    memory: GpuMemory


def has_gpu() -> bool:
    """Whether torch sees a GPU that there are kernels for; says why not if it sees another."""
    if not torch.cuda.is_available():
        return False
    try:
        target_of(torch.device("cuda", 0))
    except UnsupportedTargetError as error:
        _log.warning("%s", error)
        return False
    return True


def open_gpu(index: int, utilization: float) -> Gpu:
    """Makes a GPU the current one of this process.

    Args:
        index: among those torch sees.
        utilization: share of its memory to use.
    Raises: ConfigError: there is none, none of this index, none with kernels, or others hold its memory.
    """
    if not torch.cuda.is_available():
        built = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} ({built}) sees no GPU; check nvidia-smi and the installed "
            "torch, or use --device cpu"
        )
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"--tensor-parallel-size needs GPU {index}, torch sees {torch.cuda.device_count()}: lower it, or make more "
            "visible with CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    try:
        target = target_of(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    except (UnsupportedTargetError, RuntimeError) as error:
        raise ConfigError(f"--device cuda: {str(error).splitlines()[0]}") from error
    properties = torch.cuda.get_device_properties(device)
    memory = GpuMemory(properties.name, total_bytes, free_bytes, utilization)
    _log.info("GPU %d: %s, %s, %.1f GiB", index, properties.name, target.name, total_bytes / 2**30)
    return Gpu(device, target, properties.multi_processor_count, memory)


def measure_memory(
    gpu: Gpu, ops: GpuOps, make_runner: MakeRunner, config: SchedulerConfig, vocab_size: int, bytes_per_token: int
) -> MemoryUse:
    """Runs the largest step there can be and records two CUDA graphs, with a cache just large enough for them.

    Every rank of a group must do so at once. What was allocated for it is free again afterwards.

    Args:
        gpu: where the model has been loaded, and nothing else yet.
        ops: the model's.
        make_runner: makes a runner of it.
        config: limits of a step; the size of its cache counts for nothing.
        vocab_size: of the model.
        bytes_per_token: of the cache of this rank.

    Raises:
        ConfigError: the largest step does not fit.
        EngineError: it failed otherwise.
    """
    device, memory = gpu.device, gpu.memory
    torch.cuda.synchronize(device)
    free_after_loading = torch.cuda.mem_get_info(device)[0]
    weights_bytes = memory.free_bytes - free_after_loading
    reserved_after_loading = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)

    cache = _smallest_cache(config, bytes_per_token)
    small = replace(config, num_blocks=cache.num_blocks, max_model_len=cache.num_tokens, max_steps_in_flight=1)
    try:
        run_largest_step(make_runner(cache, ()), small, vocab_size)
        torch.cuda.synchronize(device)
        reserved_bytes = torch.cuda.max_memory_reserved(device) - reserved_after_loading
        # What libraries take past torch's allocator: workspaces, and the kernels themselves.
        other_bytes = (
            free_after_loading
            - torch.cuda.mem_get_info(device)[0]
            - (torch.cuda.memory_reserved(device) - reserved_after_loading)
        )
        ladder = decode_buckets(config.max_num_seqs)
        make_runner(cache, ladder[-2:])
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"the largest step, {config.max_num_seqs} requests and {config.max_num_batched_tokens} tokens, does not "
            f"fit beside the weights: {str(error).splitlines()[0]} Lower --max-num-batched-tokens or --max-num-seqs"
        ) from error
    first_bytes, second_bytes = (*ops.graphs_bytes, 0, 0)[:2]
    gc.collect()
    torch.cuda.empty_cache()
    return MemoryUse(
        weights_bytes=weights_bytes,
        step_bytes=max(0, reserved_bytes + other_bytes - cache.num_bytes),
        graphs_bytes=graphs_bytes(first_bytes, second_bytes, len(ladder)),
    )


def _smallest_cache(config: SchedulerConfig, bytes_per_token: int) -> KVCachePlan:
    """Room for the prompts of the largest step and a token after each."""
    tokens_per_request = -(-config.max_num_batched_tokens // config.max_num_seqs) + 1
    blocks_per_request = -(-tokens_per_request // config.block_size)
    num_blocks = config.max_num_seqs * blocks_per_request
    # Buffers of a runner grow with the longest request: that stays what it will be.
    return KVCachePlan(num_blocks, config.block_size, bytes_per_token, config.max_model_len)
