"""Builds the parts of an engine from its configuration: model, KV cache, runner and scheduler."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine import __version__
from engine.config import EngineConfig
from engine.core.config import SchedulerConfig
from engine.core.drafts import DraftLimits
from engine.core.schedulers import make_scheduler
from engine.errors import ConfigError, EngineError
from engine.flags import StepLimits
from engine.interfaces import ModelRunner
from engine.model.checkpoint import open_checkpoint
from engine.model.fingerprint import weights_fingerprint
from engine.model.lora import LoraAdapter
from engine.model.model_shape import ModelShape
from engine.model.tokenizer_files import TokenizerFiles
from engine.parallel.followers import OnFailure
from engine.parallel.group import SINGLE_RANK, SingleRank
from engine.parallel.process_group import ProcessGroup
from engine.runner.kv_cache import KVCachePlan
from engine.serving.matcher_compiler import MatcherCompiler
from engine.serving.parts import CheckpointInfo, EngineParts
from engine.startup.adapters import adapters_bytes, num_adapter_slots, open_adapters
from engine.startup.device import check_device, choose_device, set_threads
from engine.startup.gpu import Gpu
from engine.startup.progress import StartupProgress
from engine.startup.rank_group import build_runner
from engine.startup.rank_task import make_task
from engine.startup.served_model import find_model, open_model
from engine.startup.step_times import measure_prior
from engine.startup.warm_up import sweep_sizes, warm_up

_log = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    startup: StartupProgress,
    on_rank_failure: OnFailure | None = None,
    on_node_stopping: Callable[[], None] = lambda: None,
    *,
    gpu: Gpu | None = None,
) -> EngineParts:
    """Loads the model and everything around it.

    Args:
        config: the engine's configuration.
        startup: reports the progress.
        on_rank_failure: see `engine.parallel.followers.Followers`; None exits this process immediately.
        on_node_stopping: see `Followers`.
        gpu: with `device` "cuda", used instead of the one that is opened: a CPU that interprets its kernels.
    Returns: the parts of an engine, warmed up.

    Raises:
        CheckpointError: the model's files: which one, and why.
        ConfigError: a flag or the memory: what to change, with numbers.
    """
    device = choose_device(config)
    check_device(config, device)
    limits = config.step_limits(device.type)
    group = _group(config, device)
    threads = set_threads(config, device)
    if config.kernels == "torch":
        _log.warning("Using plain PyTorch operations (--kernels torch): much slower, to work around a faulty kernel")
    if config.batch_invariant:
        if device.type == "cpu":
            _log.info("Batch-invariant, as CPU kernels always are: the order of summation is fixed")
        else:
            _log.info("Batch-invariant: matrix products and attention use kernels with a fixed order of summation")

    startup.begin("model", f"finding model {config.model_name}")
    is_dummy = config.load_format == "dummy"
    model_dir = find_model(config, startup)
    model = open_model(model_dir, config, device)
    shape = model.shape
    if (drafts := config.drafts) is not None:
        _announce_drafts(drafts, config, shape, device)
    adapters = open_adapters(config, model)
    tokenizer = TokenizerFiles.from_dir(model_dir, is_required=not is_dummy)
    grammars = MatcherCompiler(tokenizer, shape.vocab_size, shape.end_token_ids)
    startup.begin("grammars", "reading the tokenizer for grammars")
    grammars.prepare()  # before the cache is sized: takes 140 MB for 150,000 tokens
    if config.enable_lora:
        num_slots, num_mib = num_adapter_slots(config), adapters_bytes(config, model, adapters) / 2**20
        _log.info("LoRA adapters: %d places of rank %d, %.1f MiB", num_slots, config.max_lora_rank, num_mib)
    task = make_task(config, device, model_dir, model, threads, adapters=adapters, gpu=gpu)
    _log.info("Starting to load model %s from %s", config.model_name, model_dir)
    runner, kv_plan, progress, load_adapter = build_runner(
        task, group, device, startup, on_rank_failure or _end_process, on_node_stopping
    )
    _log_cache(kv_plan)
    if shape.state_bytes:
        _log_state(config, shape, limits, kv_plan)
    scheduler_config = _scheduler_config(config, shape, kv_plan, limits, device)
    startup.begin("warm-up", "warming up")
    warm_up(runner, scheduler_config, shape.vocab_size)
    if device.type == "cuda" and (gpu is None or gpu.device.type == "cuda"):  # an interpreted GPU loads no kernels late
        sweep_sizes(runner, scheduler_config, shape.vocab_size)
    if scheduler_config.policy == "slo":
        scheduler_config = _with_step_times(scheduler_config, runner, shape.vocab_size)
    num_late_compiles = _watch_compiles(config, device)
    return EngineParts(
        scheduler=make_scheduler(scheduler_config),
        runner=runner,
        info=_info(config, model_dir, shape, adapters, scheduler_config, tokenizer),
        tokenizer=tokenizer,
        max_open_requests=config.max_num_queued_reqs + limits.max_num_seqs,
        grammars=grammars,
        num_late_compiles=num_late_compiles,
        progress=progress,
        num_adapter_slots=num_adapter_slots(config),
        load_adapter=load_adapter if config.lora_dir else None,
        checkpoint=_checkpoint_info(model_dir),
    )


def _announce_drafts(drafts: DraftLimits, config: EngineConfig, shape: ModelShape, device: torch.device) -> None:
    if shape.state_bytes:
        raise ConfigError(
            f"--speculative-config is not supported with {config.model_name}: the state that it keeps besides keys and "
            "values cannot go back to the token before a rejected draft; omit the flag"
        )
    _log.info(
        "Drafts of up to %d tokens follow the last %d to %d tokens where they occurred before",
        drafts.num_speculative_tokens,
        drafts.prompt_lookup_min,
        drafts.prompt_lookup_max,
    )
    if device.type == "cuda":
        _log.info(
            "One step is in flight instead of two, because of --speculative-config: the GPU waits while the host plans "
            "a step"
        )


def _checkpoint_info(model_dir: Path) -> CheckpointInfo:
    fields = open_checkpoint(model_dir).config().values
    token_ids = {name: value for name in ("bos_token_id", "pad_token_id") if isinstance(value := fields.get(name), int)}
    return CheckpointInfo(
        path=str(model_dir.resolve()),
        model_type=str(fields.get("model_type", "")),
        architectures=tuple(map(str, fields.get("architectures", ()))),
        **token_ids,
    )


def _group(config: EngineConfig, device: torch.device) -> ProcessGroup | SingleRank:
    """Returns the group of ranks that share the model; this process is rank 0."""
    layout = config.layout
    if layout.num_ranks == 1:
        return SINGLE_RANK
    if device.type == "cpu" and layout.tensor_size > 1:
        size = layout.tensor_size
        _log.info("Tensor parallelism over %d ranks on one CPU uses plain PyTorch operations: for tests only", size)
    return ProcessGroup(0, layout, device)


def _end_process(error: EngineError) -> None:
    _log.critical("%s", error)
    os._exit(1)


def _watch_compiles(config: EngineConfig, device: torch.device) -> Callable[[], int]:
    """Counts kernels that are compiled from now on, which would be a defect."""
    if device.type == "cpu" or config.kernels == "torch":
        return lambda: 0  # kernels are native programs, made whole before the first step, or torch's own
    from kernels.gpu.launch import CompileCounter

    counter = CompileCounter(
        lambda kernel: _log.warning("Compiled a kernel while serving, which is a defect: %s", kernel)
    )
    return lambda: counter.num_compiles


def _log_cache(kv_plan: KVCachePlan) -> None:
    groups = kv_plan.groups
    per_token = f"{groups.num_groups * kv_plan.bytes_per_token:,} bytes per token"
    if groups.num_windowed:
        per_token += f", {groups.num_full * kv_plan.bytes_per_token:,} before the last {groups.window:,} tokens"
    _log.info("KV cache: %s, %.1f MiB in total", per_token, kv_plan.num_bytes / 2**20)
    _log.info(
        "KV cache size: %s tokens (%d blocks of %d)", f"{kv_plan.num_tokens:,}", kv_plan.num_blocks, kv_plan.block_size
    )
    _log.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{kv_plan.max_model_len:,}",
        kv_plan.num_longest_requests,
    )


def _log_state(config: EngineConfig, shape: ModelShape, limits: StepLimits, kv_plan: KVCachePlan) -> None:
    _log.info(
        "State besides keys and values: %.4g MiB per request, %.4g MiB for %d requests",
        shape.state_bytes / 2**20,
        limits.max_num_seqs * shape.state_bytes / 2**20,
        limits.max_num_seqs,
    )
    if kv_plan.num_snapshots:
        _log.info(
            "Prefixes are reused where one of %d copies of a state is kept, %.4g MiB of the cache",
            kv_plan.num_snapshots,
            kv_plan.snapshot_bytes / 2**20,
        )
    elif config.enable_prefix_caching:
        _log.info("Prefixes are not reused: the state of a request cannot go back to an earlier token")


def _scheduler_config(
    config: EngineConfig, shape: ModelShape, kv_plan: KVCachePlan, limits: StepLimits, device: torch.device
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=kv_plan.num_blocks,
        block_size=kv_plan.block_size,
        cache_groups=kv_plan.groups,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=kv_plan.max_model_len,
        end_token_ids=shape.end_token_ids,
        enable_prefix_caching=config.enable_prefix_caching and (not shape.state_bytes or kv_plan.num_snapshots > 0),
        num_state_snapshots=kv_plan.num_snapshots if shape.state_bytes else None,
        records_cache_events=config.api == "vllm",
        policy=config.scheduling_policy,
        max_waiting=config.max_num_queued_reqs,
        max_steps_in_flight=config.max_steps_in_flight(device.type),
        num_stages=config.pipeline_parallel_size,
        drafts=config.drafts,
        best_effort_share=config.best_effort_share,
        max_step_s=config.max_step_time_s,
        tenant_weights=config.weights_by_tenant,
    )


def _with_step_times(config: SchedulerConfig, runner: ModelRunner, vocab_size: int) -> SchedulerConfig:
    """Adds the prior of step times, measured now."""
    prior = measure_prior(runner, config, vocab_size)
    if prior is None:
        raise ConfigError(
            f"--scheduling-policy slo cannot measure step times with --max-num-batched-tokens "
            f"{config.max_num_batched_tokens} and --max-model-len {config.max_model_len}: raise them"
        )
    return replace(config, step_time=prior)


def _info(
    config: EngineConfig,
    model_dir: Path,
    shape: ModelShape,
    adapters: Sequence[LoraAdapter],
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
        num_kv_blocks=scheduler_config.num_cache_blocks,
        max_num_seqs=scheduler_config.max_num_seqs,
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        vocab_size=shape.vocab_size,
        end_token_ids=sorted(shape.end_token_ids),
        max_logprobs=config.max_logprobs,
        engine_version=__version__,
        adapters=[pb.Adapter(name=adapter.name, sha256=adapter.sha256) for adapter in adapters],
        aliases=config.model_names[1:],
    )
