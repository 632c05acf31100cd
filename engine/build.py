"""From a configuration to an engine that is ready to serve: model, cache, runner, scheduler, in this order and with
the usual log lines.
"""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine import __version__
from engine.config import EngineConfig, StepLimits
from engine.core.config import SchedulerConfig
from engine.core.scheduler import Scheduler
from engine.errors import ConfigError
from engine.fingerprint import weights_fingerprint
from engine.machine import available_memory_bytes, usable_cpus
from engine.model.config import ModelConfig
from engine.model.hub import resolve_model
from engine.model.loader import load_model, resolve_dtype, weights_bytes
from engine.runner.kv_cache import KVCachePlan, kv_bytes_per_token, plan_kv_cache
from engine.runner.model_runner import TorchModelRunner
from engine.serving import EngineParts
from engine.tokenizer_files import TokenizerFiles
from engine.warm_up import warm_up
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.threads import set_num_threads
from kernels.ops import cpu_ops

# The cache's share of the memory that the weights leave, when no size is given. The rest is for activations and for the
# machine's other users.
CPU_CACHE_SHARE = 0.5
CPU_CACHE_MAX_BYTES = 4 * 2**30

_GIB = 2**30

_log = logging.getLogger(__name__)


def build_engine(config: EngineConfig, progress: Callable[[str], None]) -> EngineParts:
    """Loads the model and everything around it.

    Args:
        config: what the user wants.
        progress: told what is being done, for people.
    Returns: the parts of an engine, warmed up.

    Raises:
        CheckpointError: the model's files: which one, and why.
        ConfigError: a flag or the memory: what to change, with numbers.
    """
    started_s = time.monotonic()
    device = _device(config)
    limits = config.step_limits(device.type)
    threads = _set_threads(config)
    if config.batch_invariant:
        _log.info("Batch-invariant, as CPU kernels always are: every value is added up in one order")

    progress(f"finding model {config.model}")
    model_dir = resolve_model(config.model)
    model_config = ModelConfig.from_dir(model_dir)
    tokenizer = TokenizerFiles.from_dir(model_dir)
    dtype = resolve_dtype(config.dtype, model_config, device)
    kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else dtype
    # Before the weights: a model that cannot fit should say so at once.
    free_bytes = _bytes_beside_weights(weights_bytes(model_config, dtype), dtype)
    kv_plan = plan_kv_cache(
        model_config,
        kv_dtype,
        config.block_size,
        _cache_bytes(config, model_config, kv_dtype, limits, free_bytes),
        config.max_model_len,
        config.num_gpu_blocks_override,
    )

    _log.info("Starting to load model %s", config.model)
    ops = cpu_ops(quantization=config.quantization, num_threads=threads)
    load_started_s = time.monotonic()
    model = load_model(
        model_dir,
        model_config,
        ops,
        dtype=dtype,
        device=device,
        max_model_len=kv_plan.max_model_len,
        load_format=config.load_format,
        seed=config.seed,
        progress=lambda fraction: progress(f"loading weights {100 * fraction:.0f} %"),
        show_progress_bar=sys.stderr.isatty(),
    )
    _log.info("Loading weights took %.2f seconds", time.monotonic() - load_started_s)

    progress("allocating the KV cache")
    runner = TorchModelRunner(
        model,
        model_config,
        kv_plan,
        ops,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kv_dtype=kv_dtype,
    )
    _log_cache(kv_plan)
    scheduler_config = _scheduler_config(config, model_config, kv_plan, limits)
    progress("warming up")
    _log.info("Warming up; the first start on a machine compiles the CPU kernels, which takes some 20 seconds")
    warm_up(runner, scheduler_config, model_config.vocab_size)
    _log.info("init engine (load model, create kv cache, warmup model) took %.2f seconds", time.monotonic() - started_s)
    return EngineParts(
        scheduler=Scheduler(scheduler_config),
        runner=runner,
        info=_info(config, model_dir, model_config, scheduler_config, tokenizer),
        tokenizer=tokenizer,
        max_open_requests=config.max_num_queued_reqs + limits.max_num_seqs,
    )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda":
        raise ConfigError("--device cuda: this version computes on CPUs only; use --device cpu or auto")
    return torch.device("cpu")


def _set_threads(config: EngineConfig) -> int:
    """Checks and sets the number of threads, and says what the CPU lacks."""
    threads = config.threads or usable_cpus()
    try:
        set_num_threads(threads)
    except ValueError as error:
        raise ConfigError(f"--threads {threads}: {error}") from error
    _log.info("Using %d CPU threads", threads)
    features = cpu_features()
    if not features.avx512:
        _log.warning("This CPU has no AVX-512: kernels run on its narrower vectors, at a fraction of the speed")
    if config.quantization == "int8" and not features.vnni:
        _log.warning(
            "This CPU has no AVX-512 VNNI: --quantization int8 saves memory, its weights are multiplied in float32"
        )
    return threads


def _bytes_beside_weights(num_weights_bytes: int, dtype: torch.dtype) -> int:
    """The memory that is left for everything else once the weights are loaded."""
    available_bytes = available_memory_bytes()
    _log.info("Available memory: %.2f GiB, weights: %.2f GiB", available_bytes / _GIB, num_weights_bytes / _GIB)
    if num_weights_bytes > available_bytes:
        raise ConfigError(
            f"the weights take {num_weights_bytes / _GIB:.4f} GiB in {str(dtype).removeprefix('torch.')}, "
            f"{available_bytes / _GIB:.4f} GiB of memory is free: serve a smaller --model, or free memory"
        )
    return available_bytes - num_weights_bytes


def _cache_bytes(
    config: EngineConfig, model_config: ModelConfig, kv_dtype: torch.dtype, limits: StepLimits, free_bytes: int
) -> int:
    """The memory the cache may take: what is asked for, else a share of what the weights leave, and never more than
    requests could fill.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    blocks_per_request = -(-max_model_len // config.block_size)
    most_bytes = (
        limits.max_num_seqs * blocks_per_request * config.block_size * kv_bytes_per_token(model_config, kv_dtype)
    )
    return min(int(free_bytes * CPU_CACHE_SHARE), CPU_CACHE_MAX_BYTES, most_bytes)


def _log_cache(kv_plan: KVCachePlan) -> None:
    _log.info(
        "KV cache: %s bytes per token, %.1f MiB in all", f"{kv_plan.bytes_per_token:,}", kv_plan.num_bytes / 2**20
    )
    _log.info(
        "KV cache size: %s tokens (%d blocks of %d)", f"{kv_plan.num_tokens:,}", kv_plan.num_blocks, kv_plan.block_size
    )
    _log.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{kv_plan.max_model_len:,}",
        kv_plan.num_tokens / kv_plan.max_model_len,
    )


def _scheduler_config(
    config: EngineConfig, model_config: ModelConfig, kv_plan: KVCachePlan, limits: StepLimits
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=kv_plan.num_blocks,
        block_size=kv_plan.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=kv_plan.max_model_len,
        end_token_ids=model_config.end_token_ids,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
        max_waiting=config.max_num_queued_reqs,
    )


def _info(
    config: EngineConfig,
    model_dir: Path,
    model_config: ModelConfig,
    scheduler_config: SchedulerConfig,
    tokenizer: TokenizerFiles,
) -> pb.EngineInfo:
    is_dummy = config.load_format == "dummy"
    return pb.EngineInfo(
        model=config.model_name,
        weights_revision=f"dummy-{config.seed}" if is_dummy else weights_fingerprint(model_dir),
        tokenizer_sha256=tokenizer.sha256(),
        max_model_len=scheduler_config.max_model_len,
        block_size=scheduler_config.block_size,
        num_kv_blocks=scheduler_config.num_blocks,
        max_num_seqs=scheduler_config.max_num_seqs,
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        vocab_size=model_config.vocab_size,
        end_token_ids=sorted(model_config.end_token_ids),
        max_logprobs=config.max_logprobs,
        engine_version=__version__,
    )
