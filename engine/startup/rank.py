"""Builds one rank: its shard of the model, its KV cache and its runner, in every process of a group."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, DecoderStage
from engine.model.fp8 import Fp8Weights
from engine.model.linear_adapters import AdaptableModel
from engine.parallel.group import ParallelGroup
from engine.parallel.leading_runner import LeadingRunner
from engine.parallel.process_group import ProcessGroup
from engine.parallel.sampling import with_shared_draws
from engine.runner.buckets import decode_buckets, mixed_buckets
from engine.runner.first_stage_runner import FirstStageRunner
from engine.runner.kv_cache import KVCachePlan, kv_bytes_per_token, plan_kv_cache
from engine.runner.model_runner import RunnerOptions, TorchModelRunner
from engine.runner.stage_runner import StageRunner
from engine.runner.step_model import StepModel
from engine.runner.stream import CudaStream, InlineStream, Stream
from engine.startup.adapters import ModelAdapters, adapters_bytes
from engine.startup.device import kept_weights
from engine.startup.gpu import Gpu, open_gpu
from engine.startup.gpu_memory import kv_cache_bytes
from engine.startup.kernel_check import check_cpu_kernels, check_gpu_kernels, model_forms
from engine.startup.machine import returning_freed_matrices
from engine.startup.progress import StartupProgress
from engine.startup.rank_task import RankTask
from engine.startup.served_model import ServedModel, bytes_of_weights, load, shard_of, shard_shape
from kernels.families import cpu_ops, reference_ops
from kernels.gpu.attention_backends import UnsupportedBackendError, attention_backend
from kernels.gpu.targets import Target, UnsupportedTargetError
from kernels.interface import AdapterOps, KernelOps
from kernels.scale_groups import FP8_BLOCK_SIZE

if TYPE_CHECKING:
    from kernels.cpu.ops import CpuOps
    from kernels.gpu.ops import GpuOps
    from kernels.reference.ops import ReferenceOps

_log = logging.getLogger(__name__)


class RankParts(NamedTuple):
    """Result of `build_rank`.

    Attributes:
        runner: of this rank, or of all of them.
        kv_plan: the cache, of the same size on all ranks.
        progress: see `EngineParts`.
        adapters: with --enable-lora, the reserved adapters.
    """

    runner: TorchModelRunner | StageRunner | LeadingRunner
    kv_plan: KVCachePlan
    progress: Callable[[], object] | None = None
    adapters: ModelAdapters | None = None


def build_rank(task: RankTask, group: ParallelGroup, device: torch.device, startup: StartupProgress) -> RankParts:
    """Builds the runner of this rank's shard.

    Raises:
        CheckpointError: the model's files: which one, and why.
        ConfigError: the GPU or the memory.
    """
    if device.type == "cuda":
        try:
            gpu = task.gpu or open_gpu(
                device.index,
                task.config.gpu_memory_utilization,
                needs_kernels=not task.config.uses_torch_kernels("cuda"),
            )
            if isinstance(group, ProcessGroup) and task.config.all_reduce == "auto":
                group.use_symmetric_memory(task.dtype)
            return _build_on_gpu(task, group, gpu, startup)
        except (UnsupportedTargetError, UnsupportedBackendError) as error:
            raise ConfigError(str(error)) from error
    cpu: CpuOps | None = None
    ops: CpuOps | ReferenceOps
    if not task.config.uses_torch_kernels("cpu"):
        from engine.startup.cpu_threads import multiplies_in_bf16  # and with it numba

        in_bf16 = multiplies_in_bf16(task.config)
        ops = cpu = _cpu_ops(task, startup, in_bf16=in_bf16)
        forms = model_forms(
            task.config,
            task.model,
            torch.float32,
            task.kv_dtype,
            kept=kept_weights(task.config, "cpu"),
            weights_dtype=task.dtype,
            multiplies_in_bf16=in_bf16,
        )
        check_cpu_kernels(task.config, ops, forms, startup)
        if not isinstance(task.model, ModelConfig):
            torch.set_num_threads(task.num_threads)
    else:
        torch.set_num_threads(task.num_threads)
        ops = reference_ops()
    assert task.kv_plan is not None, "on a CPU the cache is sized before loading"
    with returning_freed_matrices():
        model = _load(task, group, ops, device, startup)
    kv_plan = _agreed(task.kv_plan, group, model)
    reserved = _load_adapters(task, model, ops, startup)
    startup.begin("KV cache", "allocating the KV cache")
    runner = _make_runner(task, group, model, ops, kv_plan)
    progress = None
    if cpu is not None and isinstance(runner, TorchModelRunner):
        counted = runner
        progress = lambda: (cpu.progress(), counted.num_filled_masks)  # noqa: E731
    return RankParts(runner, kv_plan, progress, reserved)


def _agreed(kv_plan: KVCachePlan, group: ParallelGroup, model: StepModel) -> KVCachePlan:
    """Returns the plan with as many blocks and state snapshots as every rank has memory for.

    The scheduler has one table for all ranks. There are no snapshots if the model cannot resume from them at once.
    """
    agreed = replace(
        kv_plan,
        num_blocks=group.minimum(kv_plan.num_blocks),
        num_snapshots=group.minimum(kv_plan.num_snapshots) if model.resumes_states else 0,
    )
    return replace(agreed, max_model_len=agreed.fitting(kv_plan.max_model_len))


def _cpu_ops(task: RankTask, startup: StartupProgress, *, in_bf16: bool) -> "CpuOps":
    num_compiled = 0

    def on_compiled(done: int, total: int) -> None:
        nonlocal num_compiled
        num_compiled = done
        startup.update(f"compiling CPU kernels, {done} of {total}")

    startup.begin("kernels", "loading CPU kernels")
    quantization: Literal["int8"] | None = "int8" if task.config.quantization == "int8" else None
    ops = cpu_ops(
        quantization=quantization, multiplies_in_bf16=in_bf16, num_threads=task.num_threads, on_compiled=on_compiled
    )
    what = f"Compiling {num_compiled} CPU kernels" if num_compiled else "Loading the CPU kernels"
    _log.info("%s took %.2f seconds", what, startup.phase_s())
    return ops


def _build_on_gpu(task: RankTask, group: ParallelGroup, gpu: Gpu, startup: StartupProgress) -> RankParts:
    from engine.startup.gpu_profile import (  # and with it Triton, which takes half a second
        log_memory_in_use,
        log_unrecorded,
        longest_attention,
        measure_memory,
        smallest_cache,
    )
    from kernels.gpu.kernel_cache import NoRoomError

    config = task.config
    # Ranks exchange activations without their dtype.
    if task.dtype is torch.bfloat16 and not group.minimum(int(gpu.has_bfloat16)):
        task = _in_float16(task, "the GPU of another rank" if gpu.has_bfloat16 else gpu.memory.name)
    is_torch = config.uses_torch_kernels("cuda")
    ops: GpuOps | ReferenceOps
    if is_torch:
        ops = reference_ops(gpu.device)
    else:
        assert gpu.target is not None, "a GPU without kernels is opened only for plain PyTorch operations"
        if config.kv_cache_dtype == "fp8":
            task = replace(task, kv_dtype=gpu.target.require_fp8("--kv-cache-dtype fp8"))
        ops = _gpu_ops(task, gpu, gpu.target, startup)
    is_measured = task.measures_memory
    if is_measured:
        gpu.memory.check()
    gpu.memory.check_weights(
        bytes_of_weights(task.model, task.dtype, group, config.quantization, kept=kept_weights(config, "cuda"))
        + adapters_bytes(config, task.model, task.adapters) * task.dtype.itemsize // torch.float32.itemsize
    )
    shard = shard_of(task.model, group)
    shape = shard.shape
    has_graphs = config.records_graphs
    if has_graphs and not isinstance(shard, ModelConfig) and shard.unrecordable is not None:
        _log.info("Steps run without CUDA graphs: transformers computes %s, and %s", shard.name, shard.unrecordable)
        has_graphs = False
    if has_graphs and group.num_stages > 1:
        _log.info("Steps run without CUDA graphs: the model is in %d pipeline stages", group.num_stages)
        has_graphs = False
    stream = CudaStream(gpu.device) if gpu.device.type == "cuda" else InlineStream()
    try:
        if not is_torch:
            forms = model_forms(config, shard, task.dtype, task.kv_dtype, kept=kept_weights(config, "cuda"))
            check_gpu_kernels(config, ops, forms, gpu.device, startup)
        model = _load(task, group, ops, gpu.device, startup)
        reserved = _load_adapters(task, model, ops, startup)

        def make_runner(plan: KVCachePlan, has_graphs: bool) -> TorchModelRunner | StageRunner:
            return _make_runner(task, group, model, ops, plan, stream=stream, has_graphs=has_graphs)

        cache_bytes = config.kv_cache_memory_bytes or 0  # unused if the number of blocks is given
        if is_measured:
            what = "measuring the largest step" if is_torch else "compiling kernels and measuring the largest step"
            startup.begin("kernels", what)
            bytes_per_token = kv_bytes_per_token(shape, task.kv_dtype)
            # No cache of this GPU holds a longer request than its budget, whatever the model's context.
            longest_len = shape.max_position_embeddings
            if shape.cache_groups.num_full:
                longest_len = min(longest_len, max(1, gpu.memory.budget_bytes // bytes_per_token))
            longest_len = config.max_model_len or longest_len
            cache = smallest_cache(task.limits, config.block_size, bytes_per_token, longest_len, shape.cache_groups)
            longest = longest_attention(ops, shape, task.limits, cache, task.dtype, task.kv_dtype, gpu.device)
            use = measure_memory(
                gpu,
                ops,
                make_runner,
                limits=task.limits,
                has_graphs=has_graphs,
                cache=cache,
                vocab_size=shape.vocab_size,
                has_adapters=bool(task.adapters) or config.enable_lora,
                run_longest_attention=longest if is_torch or config.other_attention is not None else None,
            )
            cache_bytes = kv_cache_bytes(gpu.memory, use)
            _log.info("%s took %.2f seconds", _capitalized(what), startup.phase_s())
        kv_plan = plan_kv_cache(
            shape,
            task.kv_dtype,
            config.block_size,
            cache_bytes,
            config.max_model_len,
            config.num_gpu_blocks_override,
            step_tokens=config.max_tokens_in_flight("cuda"),
            max_snapshots=config.max_state_snapshots("cuda"),
        )
        kv_plan = _agreed(kv_plan, group, model)
        startup.begin("KV cache and graphs", "allocating the KV cache and recording CUDA graphs")
        runner = make_runner(kv_plan, has_graphs)
        _log_recording(is_measured or is_torch, has_graphs, startup)
        log_unrecorded(ops)
        if is_measured:
            log_memory_in_use(gpu)
        return RankParts(runner, kv_plan, None, reserved)
    except NoRoomError as error:
        raise ConfigError(str(error)) from error
    except torch.OutOfMemoryError as error:
        num_mib = shape.state_bytes / 2**20
        state = f", --max-num-seqs (each has a state of {num_mib:.4g} MiB)" if num_mib else ""
        raise ConfigError(
            f"the GPU is out of memory: {str(error).splitlines()[0]} Lower --gpu-memory-utilization{state} or "
            "--kv-cache-memory-bytes, or stop other processes on it"
        ) from error


def _gpu_ops(task: RankTask, gpu: Gpu, target: Target, startup: StartupProgress) -> "GpuOps":
    from kernels.gpu.launch import load_driver
    from kernels.gpu.linear_probe import check_row_scaled_product
    from kernels.gpu.ops import GpuOps
    from kernels.gpu.tiles import scaled_product_tiles

    if gpu.device.type == "cuda":
        load_driver()
    attention, name = None, task.config.other_attention
    if name is not None:
        attention = attention_backend(
            name,
            device=gpu.device,
            target=target,
            head_dims=[layer.head_dim for layer in task.model.shape.layers],
            dtype=task.dtype,
            kv_dtype=task.kv_dtype,
        )
        _log.info("Steps run without CUDA graphs, because of --attention-backend %s", name)
    fp8, quantizes = _fp8(task.model), task.config.quantization == "fp8"
    has_blocks = fp8 is not None and fp8.has_blocks
    has_row_scales = quantizes or (fp8 is not None and not has_blocks)
    what = "--quantization fp8" if quantizes else "quantization_config of the checkpoint"
    if task.config.batch_invariant and has_row_scales and not scaled_product_tiles(target):
        raise ConfigError(
            f"{what}: 8-bit weights with scales per tensor or output channel are not supported with --batch-invariant "
            f"on {target.name}, where the batch decides the order of summation: omit the flag, or use other weights"
        )
    ops = GpuOps(
        gpu.device,
        target,
        num_processors=gpu.num_processors,
        quantize_weights=quantizes,
        quantize_inputs=has_row_scales or (has_blocks and target.fp8_dtype is not None),
        input_group_size=FP8_BLOCK_SIZE if has_blocks else None,
        attention=attention,
        batch_invariant=task.config.batch_invariant,
        adapter_dtype=task.dtype,
        progress=startup.count,
    )
    if has_row_scales and not task.config.batch_invariant:
        check_row_scaled_product(what, task.dtype, device=gpu.device, target=target, gpu_name=gpu.memory.name)
    return ops


def _fp8(model: ServedModel) -> Fp8Weights | None:
    """Returns which linear layers of the checkpoint are in 8-bit floats."""
    return model.quantized if isinstance(model.quantized, Fp8Weights) else None


def _in_float16(task: RankTask, gpu_name: str) -> RankTask:
    """Returns the task with float16 instead of bfloat16, which a rank's GPU lacks, unless a flag asks for bfloat16."""
    if task.config.dtype != "auto":
        raise ConfigError(f"--dtype bfloat16: {gpu_name} has no bfloat16; use --dtype float16, or auto")
    _log.warning("%s has no bfloat16: the model runs in float16, where values above 65,504 overflow", gpu_name)
    kv_dtype = torch.float16 if task.kv_dtype is torch.bfloat16 else task.kv_dtype
    return replace(task, dtype=torch.float16, kv_dtype=kv_dtype)


def _log_recording(is_compiled: bool, has_graphs: bool, startup: StartupProgress) -> None:
    done = [] if is_compiled else ["compiling kernels"]
    if has_graphs:
        done.append("recording CUDA graphs")
    if done:
        _log.info("%s took %.2f seconds", _capitalized(" and ".join(done)), startup.phase_s())


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def _load(
    task: RankTask, group: ParallelGroup, ops: KernelOps, device: torch.device, startup: StartupProgress
) -> StepModel:
    num_bytes = 0

    def on_loaded(done: int, total: int) -> None:
        nonlocal num_bytes
        num_bytes = done
        startup.update(f"loading weights {100 * done // total} % ({_amount(done, startup.phase_s())})")

    startup.begin("weights", "loading weights")
    model = load(
        task.model,
        task.model_dir,
        ops,
        task.config,
        dtype=task.dtype,
        device=device,
        max_model_len=task.kv_plan.max_model_len if task.kv_plan is not None else task.config.max_model_len,
        group=group,
        progress=on_loaded,
    )
    read = _amount(num_bytes, startup.phase_s()) if num_bytes else "random"
    _log.info("Loading and packing weights took %.2f seconds (%s)", startup.phase_s(), read)
    return model


def _load_adapters(task: RankTask, model: StepModel, ops: AdapterOps, startup: StartupProgress) -> ModelAdapters | None:
    """Loads the adapters of the start; returns what loads others at run time, if memory is reserved for them."""
    if not task.adapters and not task.config.enable_lora:
        return None
    assert isinstance(model, AdaptableModel), "adapters are refused for pipeline stages"
    startup.begin("adapters", f"loading {len(task.adapters)} LoRA adapters")
    if not task.config.enable_lora:
        model.set_adapters(ops, [adapter.read() for adapter in task.adapters])
        return None
    reserved = ModelAdapters.reserve(task.config, model, ops)
    for index, adapter in enumerate(task.adapters):
        reserved.write(index, adapter)
    return reserved


def _amount(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB, {num_bytes / 1e9 / max(seconds, 1e-6):.2f} GB/s"


def _make_runner(
    task: RankTask,
    group: ParallelGroup,
    model: StepModel,
    ops: KernelOps,
    kv_plan: KVCachePlan,
    *,
    stream: Stream | None = None,
    has_graphs: bool = False,
) -> TorchModelRunner | StageRunner:
    shape = shard_shape(task.model, group)
    max_num_seqs, max_num_batched_tokens = task.limits
    options = RunnerOptions(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_dtype=task.kv_dtype,
        stream=stream,
        max_steps_in_flight=task.config.max_steps_in_flight("cpu" if stream is None else "cuda"),
        max_logprobs=task.config.max_logprobs,
        decode_buckets=decode_buckets(max_num_seqs) if has_graphs else (),
        mixed_buckets=mixed_buckets(max_num_batched_tokens) if has_graphs else (),
        has_adapters=bool(task.adapters) or task.config.enable_lora,
    )
    if isinstance(model, DecoderStage):
        return StageRunner(model, shape, kv_plan, ops, group, options)
    ops = with_shared_draws(ops, group)
    if group.num_stages > 1:
        assert isinstance(model, Decoder), "pipeline stages are refused for other models"
        return FirstStageRunner(model, shape, kv_plan, ops, group, options)
    return TorchModelRunner(model, shape, kv_plan, ops, options)
