"""One rank's part of the engine: model, cache and runner on its device, built alike in every process of a group."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig, StepLimits
from engine.interfaces import ModelRunner
from engine.model.config import ModelConfig
from engine.model.loader import load_model
from engine.model.sharding import Sharding
from engine.parallel.followers import START_TIMEOUT_S, Followers, OnFailure
from engine.parallel.group import ParallelGroup, SingleRank
from engine.parallel.leading_runner import LeadingRunner
from engine.parallel.process_group import ProcessGroup
from engine.parallel.sampling import with_shared_draws
from engine.runner.kv_cache import KVCachePlan
from engine.runner.model_runner import TorchModelRunner
from kernels.ops import cpu_ops, reference_ops

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankTask:
    """What every rank builds its part from.

    Attributes:
        model_dir: the checkpoint's folder.
        model_config: of the whole model.
        dtype: of weights and activations.
        kv_dtype, kv_plan: of the cache of one rank.
        limits: of a step.
        num_threads: CPU threads of one rank.
    """

    config: EngineConfig
    model_dir: Path
    model_config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_plan: KVCachePlan
    limits: StepLimits
    num_threads: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a follower is told first.

    Attributes:
        rank: which one it is, of `size`.
        device: where its part lies.
        meeting_folder: where the ranks find each other.
    """

    rank: int
    size: int
    device: torch.device
    meeting_folder: Path
    task: RankTask


def build_runner(
    task: RankTask,
    group: ProcessGroup | SingleRank,
    device: torch.device,
    progress: Callable[[str], None],
    on_failure: OnFailure,
) -> ModelRunner:
    """The runner of the whole model; starts the other ranks' processes where there are any.

    Args:
        task: what to build.
        group: of this process, rank 0.
        device: of rank 0; the other ranks have the ones after it, or the same CPU.
        progress: told what is being done, for people.
        on_failure: see `Followers`.
    Raises: EngineError: rank 0 could not build its part.
    """
    if isinstance(group, SingleRank):
        return build_rank(task, group, device, progress)
    followers = Followers(group, timeout_s=task.config.rank_timeout_s, on_failure=on_failure)
    try:
        progress(f"starting {group.size} ranks")
        folder = followers.meeting_folder
        devices = [device if device.type == "cpu" else torch.device(device.type, rank) for rank in range(group.size)]
        followers.assign([Assignment(rank, group.size, devices[rank], folder, task) for rank in range(1, group.size)])
        with followers.waiting_for("the other ranks to start", START_TIMEOUT_S):
            group.join(folder, collective_timeout_s(task.config))
        runner = build_rank(task, group, device, progress)
        followers.wait_ready()
    except BaseException:
        followers.close()
        raise
    return LeadingRunner(runner, followers)


def collective_timeout_s(config: EngineConfig) -> float:
    """How long a collective waits: rank 0 is to say what hangs before torch gives up on it."""
    return 2 * max(config.rank_timeout_s, START_TIMEOUT_S)


def build_rank(
    task: RankTask, group: ParallelGroup, device: torch.device, progress: Callable[[str], None]
) -> TorchModelRunner:
    """The runner of this rank's part.

    Raises:
        CheckpointError: the model's files: which one, and why.
        ConfigError: the memory.
    """
    config = task.config
    if group.size == 1:
        ops = cpu_ops(quantization=config.quantization, num_threads=task.num_threads)
    else:  # the fast operations run a step as one native program, and a collective is none of its instructions
        torch.set_num_threads(task.num_threads)
        ops = reference_ops()
    started_s = time.monotonic()
    model = load_model(
        task.model_dir,
        task.model_config,
        ops,
        dtype=task.dtype,
        device=device,
        max_model_len=task.kv_plan.max_model_len,
        load_format=config.load_format,
        seed=config.seed,
        group=group,
        progress=lambda fraction: progress(f"loading weights {100 * fraction:.0f} %"),
        show_progress_bar=group.rank == 0 and sys.stderr.isatty(),
    )
    _log.info("Loading weights took %.2f seconds", time.monotonic() - started_s)
    progress("allocating the KV cache")
    return TorchModelRunner(
        model,
        Sharding.of(task.model_config, group.rank, group.size).config_of(task.model_config),
        task.kv_plan,
        with_shared_draws(ops, group),
        max_num_seqs=task.limits.max_num_seqs,
        max_num_batched_tokens=task.limits.max_num_batched_tokens,
        kv_dtype=task.kv_dtype,
        max_steps_in_flight=config.max_steps_in_flight(device.type),
    )
