"""What the runner of the first pipeline stage prepares at start; `tests/engine/parallel/test_stages.py` has answers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from engine.parallel.group import SingleRank
from engine.runner.first_stage_runner import FirstStageRunner
from engine.runner.kv_cache import plan_kv_cache
from engine.runner.stream import CudaStream
from engine.startup.served_model import shard_shape
from kernels.gpu.launch import is_compile_only
from kernels.sampling import SamplingBatch


def test_the_kernels_of_the_output_head_and_of_the_sampler_are_compiled_at_start(
    make_checkpoint: Callable[..., Path], gpu_ops: Callable[..., Any], gpu_device: torch.device
) -> None:
    """The stage's own step ends before them. A kernel that is compiled later stalls all requests."""
    path, group, ops = make_checkpoint("gemma2", num_hidden_layers=2), SingleRank(stage=0, num_stages=2), gpu_ops()
    config = ModelConfig.from_dir(path)
    used: list[tuple[str, bool, tuple[int, ...]]] = []
    sample, soft_cap = ops.sample, ops.soft_cap

    def noted_sample(logits: torch.Tensor, batch: SamplingBatch) -> Any:
        used.append(("sample", is_compile_only(), tuple(logits.shape)))
        return sample(logits, batch)

    def noted_soft_cap(logits: torch.Tensor, limit: float) -> torch.Tensor:
        used.append(("soft_cap", is_compile_only(), tuple(logits.shape)))
        result: torch.Tensor = soft_cap(logits, limit)
        return result

    ops.sample, ops.soft_cap = noted_sample, noted_soft_cap
    model = load_model(path, config, ops, device=gpu_device, group=group)
    assert isinstance(model, Decoder)
    shape = shard_shape(config, group)
    plan = plan_kv_cache(shape, torch.float32, 16, 0, None, num_blocks_override=8)
    FirstStageRunner(
        model,
        shape,
        replace(plan, max_model_len=64),
        ops,
        group,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        stream=CudaStream(gpu_device) if gpu_device.type == "cuda" else None,
    )
    logits_shape = (1, shape.vocab_size)
    assert used == [("soft_cap", True, logits_shape), ("sample", True, logits_shape)]
