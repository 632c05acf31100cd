"""A simulated GPU for whole engines: torch's CPU tensors, and kernels under Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from engine.startup.gpu import Gpu
from engine.startup.gpu_memory import GpuMemory
from kernels.gpu.targets import TARGETS
from kernels.gpu.tiles import has_latent_kernels
from kernels.interface import Step
from kernels.metadata import StepInputs
from tests.support.engine.stream import LateStream
from tests.support.kernels.interpreter import patch_language_once_per_launch

MIB = 2**20
WEIGHTS_BYTES = 3 * MIB
STEP_BYTES = 5 * MIB


class FakeGraphs:
    """Computes what a graph would replay; records the batch sizes requested."""

    num_bytes: ClassVar[int] = 2 * MIB
    held_bytes: ClassVar[int] = 0
    seen: ClassVar[set[int]] = set()
    unrecorded: Sequence[object] = ()

    def __init__(
        self, step: Step, largest: StepInputs, sizes: Sequence[int], mixed_sizes: Sequence[int], *_: object
    ) -> None:
        FakeGraphs.held_bytes += self.num_bytes
        self.step = step
        assert list(sizes) == sorted(sizes)
        assert list(mixed_sizes) == sorted(mixed_sizes)
        assert mixed_sizes

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        if inputs.metadata.max_query_len == 1:
            self.seen.add(inputs.metadata.num_reqs)
        else:
            inputs = _without_padding(inputs)
        return self.step(inputs)[: inputs.logits_indices.shape[0]]


def _without_padding(inputs: StepInputs) -> StepInputs:
    """Returns the tokens of the rows: only recorded steps may have others, whose attention is not written."""
    num_tokens = int(inputs.metadata.query_start_loc[-1])
    return replace(
        inputs,
        input_ids=inputs.input_ids[:num_tokens],
        positions=inputs.positions[:num_tokens],
        metadata=replace(inputs.metadata, slot_mapping=inputs.metadata.slot_mapping[:num_tokens]),
    )


def simulate_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Makes engines find a GPU with 64 MiB, on which loading and a step take memory.

    Returns: its properties, which a test may change before it builds an engine.
    """
    patch_language_once_per_launch()
    gpu = SimpleNamespace(total=64 * MIB, held=0, out_of_memory=False, target="sm_90")
    monkeypatch.setattr("engine.startup.device.has_gpu", lambda **_: True)
    monkeypatch.setattr(
        "engine.startup.rank.open_gpu",
        lambda _index, utilization, needs_kernels: Gpu(
            torch.device("cpu"),
            TARGETS[gpu.target] if needs_kernels else None,
            num_processors=4,
            memory=GpuMemory("fake", gpu.total, gpu.total - gpu.held, utilization),
            has_bfloat16=TARGETS[gpu.target].has_bfloat16,
        ),
    )
    monkeypatch.setattr("engine.startup.served_model.takes_latents", lambda _: has_latent_kernels(TARGETS[gpu.target]))
    monkeypatch.setattr("engine.startup.rank.InlineStream", LateStream)
    monkeypatch.setattr("kernels.gpu.ops.StepGraphs", FakeGraphs)
    monkeypatch.setattr("engine.startup.gpu_memory._MAX_CONTEXT_BYTES", 4 * MIB)
    monkeypatch.setattr(FakeGraphs, "held_bytes", 0)
    monkeypatch.setattr("engine.startup.build.sweep_sizes", lambda *_: None)  # tests/engine/startup/test_warm_up.py
    FakeGraphs.seen = set()
    for name, value in {
        "empty_cache": lambda: None,
        "synchronize": lambda _: None,
        "mem_get_info": lambda _: (gpu.total - gpu.held - WEIGHTS_BYTES - FakeGraphs.held_bytes, gpu.total),
        "memory_reserved": lambda _: WEIGHTS_BYTES,
        "max_memory_reserved": lambda _: WEIGHTS_BYTES + STEP_BYTES,
        "reset_peak_memory_stats": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return gpu
