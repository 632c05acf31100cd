"""What the runner of the first pipeline stage prepares at start; `tests/engine/parallel/test_stages.py` has answers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import BlockId, RequestId, SamplingParams
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from engine.parallel.group import SingleRank
from engine.runner.first_stage_runner import FirstStageRunner
from engine.runner.kv_cache import plan_kv_cache
from engine.runner.model_runner import RunnerOptions
from engine.runner.stream import CudaStream
from engine.startup.served_model import shard_shape
from kernels.families import reference_ops
from kernels.gpu.launch import is_compile_only
from kernels.sampling import SamplingBatch
from tests.support.engine.stream import LateStream


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
        RunnerOptions(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            stream=CudaStream(gpu_device) if gpu_device.type == "cuda" else None,
        ),
    )
    logits_shape = (1, shape.vocab_size)
    assert used == [("soft_cap", True, logits_shape), ("sample", True, logits_shape)]


class Ring(SingleRank):
    """A first stage whose tensors come back as they were sent."""

    def send_onward(self, x: torch.Tensor) -> None:
        """Drops it: every row is the same to this test."""

    def receive(self, out: torch.Tensor) -> None:
        """Fills it with numbers."""
        out.fill_(1.0)


def test_the_samples_of_requests_that_stayed_are_copied_without_a_wait(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from other memory waits for all steps that were launched meanwhile."""
    buffers: list[torch.Tensor] = []

    class Stream(LateStream):
        def host_buffer(self, num_bytes: int) -> torch.Tensor:
            buffers.append(super().host_buffer(num_bytes))
            return buffers[-1]

    group, ops = Ring(stage=0, num_stages=2), reference_ops()
    path = make_checkpoint("llama")
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, ops, group=group)
    assert isinstance(model, Decoder)
    shape = shard_shape(config, group)
    plan = replace(plan_kv_cache(shape, torch.float32, 16, 0, None, num_blocks_override=8), max_model_len=64)
    runner = FirstStageRunner(
        model,
        shape,
        plan,
        ops,
        group,
        RunnerOptions(max_num_seqs=4, max_num_batched_tokens=16, stream=Stream(), max_steps_in_flight=2),
    )

    def plan_of(step: int, ids: tuple[int, ...], removed: tuple[int, ...] = ()) -> SchedulerOutput:
        params = SamplingParams(seed=0, max_tokens=4, temperature=0.0)
        new = tuple(NewRequest(RequestId(number), (5, 6), 2, params, (BlockId(number),)) for number in ids)
        rows = tuple(ScheduledRow(RequestId(number), 2, 0, (), True, 0) for number in ids)
        return SchedulerOutput(step, tuple(map(RequestId, removed)), new, rows, 2 * len(ids))

    runner.launch(plan_of(1, (1, 2)))
    runner.launch(plan_of(2, (3,), removed=(1,)))
    num_before, copy = len(buffers), torch.Tensor.to
    copied: list[tuple[torch.Tensor, dict[str, Any]]] = []

    def noted(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copied.append((x, options))
        return copy(x, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    runner.collect()
    monkeypatch.undo()
    [(owned, options)] = [(x, options) for x, options in copied if x.dtype is torch.int64 and x.tolist() == [1]]
    assert options == {"non_blocking": True}
    assert [buffer.data_ptr() for buffer in buffers[num_before:]] == [owned.data_ptr()]
    runner.collect()
