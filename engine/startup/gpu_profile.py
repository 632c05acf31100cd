"""Measures the GPU memory needed besides the KV cache, before the cache is allocated."""

import gc
import logging
from collections.abc import Callable

import torch

from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.core.config import SchedulerConfig
from engine.errors import ConfigError, StepError
from engine.flags import StepLimits
from engine.interfaces import ModelRunner
from engine.model.model_shape import ModelShape
from engine.runner.kv_cache import KVCachePlan
from engine.startup.gpu import Gpu
from engine.startup.gpu_memory import MemoryUse
from engine.startup.warm_up import run_largest_step
from kernels.gpu.memory import free_bytes
from kernels.gpu.ops import GpuOps
from kernels.interface import KernelOps
from kernels.metadata import AttentionMetadata

_log = logging.getLogger(__name__)

MakeRunner = Callable[[KVCachePlan, bool], ModelRunner]
"""(plan of the cache, whether to record CUDA graphs) -> a runner of the loaded model."""


def measure_memory(
    gpu: Gpu,
    ops: KernelOps,
    make_runner: MakeRunner,
    *,
    limits: StepLimits,
    has_graphs: bool,
    cache: KVCachePlan,
    vocab_size: int,
    has_adapters: bool = False,
    run_longest_attention: Callable[[], None] | None = None,
) -> MemoryUse:
    """Runs the largest possible step and records all CUDA graphs, with the smallest sufficient cache.

    All ranks of a group must call it together. Its allocations are freed afterwards.

    Args:
        gpu: GPU on which the model has been loaded.
        ops: operations of the model.
        make_runner: makes a runner of the model.
        limits: limits of a step.
        has_graphs: whether CUDA graphs will be recorded.
        cache: `smallest_cache` of these limits.
        vocab_size: vocabulary of the model.
        has_adapters: whether requests may have adapters.
        run_longest_attention: attends over the longest context, for operations whose temporary memory grows with it;
            that of the largest step, whose contexts are short, is then not enough.

    Raises:
        ConfigError: the largest step does not fit.
        EngineError: it failed otherwise.
    """
    device, memory = gpu.device, gpu.memory
    gc.collect()
    free_after_loading = free_bytes(device)
    reserved_after_loading = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)

    config = SchedulerConfig(
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        cache_groups=cache.groups,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=min(cache.num_tokens, cache.max_model_len),
    )
    try:
        run_largest_step(make_runner(cache, False), config, vocab_size, has_adapters)
        torch.cuda.synchronize(device)
        peak_bytes = torch.cuda.max_memory_reserved(device) - reserved_after_loading
        # Memory of libraries outside torch's allocator: workspaces and kernels.
        taken_bytes = free_after_loading - torch.cuda.mem_get_info(device)[0]
        other_bytes = taken_bytes - (torch.cuda.memory_reserved(device) - reserved_after_loading)
        attention_bytes = _peak_bytes(run_longest_attention, device) if run_longest_attention is not None else 0
        _empty_cache()
        reserved_before_graphs = torch.cuda.memory_reserved(device)
        if has_graphs:
            make_runner(cache, True)
    except (torch.OutOfMemoryError, StepError) as error:
        reason = error.__cause__ if isinstance(error, StepError) else error
        if not isinstance(reason, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"the largest step, {limits.max_num_seqs} requests and {limits.max_num_batched_tokens} tokens, does not "
            f"fit beside the weights: {str(reason).splitlines()[0]} Lower --max-num-batched-tokens or --max-num-seqs"
        ) from error
    _empty_cache()
    # torch may keep the pool of a failed capture (pytorch#190348), beside that of the next recording.
    kept_bytes = torch.cuda.memory_reserved(device) - reserved_before_graphs
    return MemoryUse(
        context_bytes=memory.context_bytes,
        weights_bytes=memory.free_bytes - free_after_loading,
        step_bytes=max(0, peak_bytes + other_bytes - cache.num_bytes) + attention_bytes,
        graphs_bytes=ops.graphs_bytes + max(0, kept_bytes) if has_graphs and isinstance(ops, GpuOps) else 0,
    )


def _empty_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def log_memory_in_use(gpu: Gpu) -> None:
    """Logs the memory of the GPU that is in use when everything has been allocated."""
    free, total = torch.cuda.mem_get_info(gpu.device)
    _log.info("GPU memory in use, with other processes: %.2f of %.2f GiB", (total - free) / 2**30, total / 2**30)


def smallest_cache(
    limits: StepLimits,
    block_size: int,
    bytes_per_token: int,
    max_model_len: int,
    groups: CacheGroups = ONE_GROUP,
) -> KVCachePlan:
    """Returns a cache for the prompts of the largest step and one token after each.

    max_model_len is at least its final value, because buffers of a runner grow with it.
    """
    tokens_per_request = -(-limits.max_num_batched_tokens // limits.max_num_seqs) + 1
    blocks_per_request = -(-tokens_per_request // block_size)
    num_blocks = limits.max_num_seqs * blocks_per_request * groups.num_groups
    return KVCachePlan(num_blocks, block_size, bytes_per_token, max_model_len, groups)


def longest_attention(
    ops: KernelOps,
    shape: ModelShape,
    limits: StepLimits,
    cache: KVCachePlan,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], None]:
    """Returns a call that attends from one step of a prompt to the longest context, all of it in one block.

    Args:
        ops: operations of the model.
        shape: of the rank's shard.
        limits: limits of a step.
        cache: any cache of the engine; its block size and `max_model_len` are used.
        dtype, kv_dtype: dtypes of activations and of the cache.
        device: device of the tensors.
    """

    @torch.inference_mode()
    def run() -> None:
        num_tokens = min(limits.max_num_batched_tokens, cache.max_model_len)

        def tensor(*numbers: int) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        metadata = AttentionMetadata(
            query_start_loc=tensor(0, num_tokens),
            seq_lens=tensor(cache.max_model_len),
            block_table=torch.zeros(1, -(-cache.max_model_len // cache.block_size), dtype=torch.int32, device=device),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            block_size=cache.block_size,
            max_query_len=num_tokens,
            max_seq_len=cache.max_model_len,
        )
        layer = shape.widest_layer
        q = torch.zeros(num_tokens, layer.num_heads, layer.head_dim, dtype=dtype, device=device)
        one_block = ops.make_kv_cache(
            1, cache.block_size, layer.num_kv_heads, layer.head_dim, kv_dtype, layer.value_dim
        )
        ops.paged_attention(q, one_block, metadata, scale=1.0)

    return run


def log_unrecorded(ops: KernelOps) -> None:
    """Warns of steps that run without CUDA graphs because their capture failed."""
    if not isinstance(ops, GpuOps) or not ops.unrecorded:
        return
    sizes: dict[tuple[str, bool], list[str]] = {}
    for size, is_decode, error in sorted(ops.unrecorded):
        sizes.setdefault((error, is_decode), []).append(str(size))
    forms = (
        f"{'decode steps (rows' if is_decode else 'steps with prompts (tokens'}: {', '.join(of)}): {error}"
        for (error, is_decode), of in sizes.items()
    )
    _log.warning(
        "Recording some CUDA graphs failed. These steps run eagerly, slower; --enforce-eager starts without graphs. %s",
        "; ".join(forms),
    )


def _peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Returns the most memory that tensors take while the work runs."""
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes
