"""Measured memory of a whole model on a fake GPU, whose kernels compute nothing and whose tensors have no memory."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loader import weights_bytes
from engine.model.shapes import find_shape
from engine.runner.buckets import decode_buckets, mixed_buckets
from engine.runner.kv_cache import KVCachePlan, kv_bytes_per_token, plan_kv_cache
from engine.runner.model_runner import RunnerOptions, TorchModelRunner
from engine.runner.sampler import SampledBuffer
from engine.startup.gpu import Gpu
from engine.startup.gpu_memory import GpuMemory, kv_cache_bytes
from engine.startup.gpu_profile import measure_memory, smallest_cache
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS
from tests.support.engine.compiles import MetaStream
from tests.support.kernels.gpu_memory import FakeGpuMemory
from tests.support.kernels.graphs import FakeGraphs

GIB = 2**30
META = torch.device("meta")
CONTEXT_BYTES = GIB // 2
BYTES_PER_GRAPH = 2**18


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpuMemory]:
    """24 GiB, less a CUDA context."""
    memory = FakeGpuMemory(24 * GIB, used_bytes=CONTEXT_BYTES)
    for name, replacement in FakeGraphs(memory, bytes_per_graph=BYTES_PER_GRAPH).patches().items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(SampledBuffer, "receive", lambda *_: None)
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **__: None)
    monkeypatch.setattr("kernels.gpu.ops.compile_only", lambda **_: nullcontext([]))
    with memory:
        yield memory


def test_default_flags_leave_47_000_tokens_beside_an_8b_model_in_16_bits_on_24_gb(memory: FakeGpuMemory) -> None:
    """Temporary memory does not depend on the number of layers: two of them run, the weights are those of all."""
    folder = find_shape("llama-3.1-8b")
    assert isinstance(folder, Path)
    config = EngineConfig(model="llama-3.1-8b")
    limits, whole = config.step_limits("cuda"), ModelConfig.from_dir(folder)
    gpu = Gpu(
        META,
        TARGETS["sm_89"],
        num_processors=128,
        memory=GpuMemory("fake", 24 * GIB, 24 * GIB - CONTEXT_BYTES, config.gpu_memory_utilization),
    )
    ops = GpuOps(META, gpu.target, num_processors=gpu.num_processors)
    small = replace(whole, num_layers=2)
    model = Decoder(
        small,
        ops,
        max_positions=whole.max_position_embeddings,
        dtype=torch.bfloat16,
        device=META,
    )
    model.load(lambda _parts: None)
    num_missing_bytes = weights_bytes(whole, torch.bfloat16) - weights_bytes(small, torch.bfloat16)
    _other_layers = torch.empty(num_missing_bytes, dtype=torch.int8, device=META)

    mixed = mixed_buckets(limits.max_num_batched_tokens)

    def make_runner(plan: KVCachePlan, has_graphs: bool) -> TorchModelRunner:
        return TorchModelRunner(
            model,
            small.shape,
            plan,
            ops,
            RunnerOptions(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                kv_dtype=torch.bfloat16,
                stream=MetaStream(),
                max_steps_in_flight=2,
                decode_buckets=decode_buckets(limits.max_num_seqs) if has_graphs else (),
                mixed_buckets=mixed if has_graphs else (),
            ),
        )

    cache = smallest_cache(
        limits, config.block_size, kv_bytes_per_token(small.shape, torch.bfloat16), whole.max_position_embeddings
    )
    use = measure_memory(
        gpu, ops, make_runner, limits=limits, has_graphs=True, cache=cache, vocab_size=whole.vocab_size
    )
    assert use.weights_bytes >= weights_bytes(whole, torch.bfloat16)
    assert use.context_bytes == CONTEXT_BYTES
    logits_bytes = limits.max_num_seqs * whole.vocab_size * 4
    assert logits_bytes < use.graphs_bytes < 1.9 * logits_bytes
    # Steps with prompts have a graph more for each layer.
    other_graphs_bytes = (whole.num_layers - small.num_layers) * len(mixed) * BYTES_PER_GRAPH
    use = replace(use, graphs_bytes=use.graphs_bytes + other_graphs_bytes)
    plan = plan_kv_cache(whole.shape, torch.bfloat16, config.block_size, kv_cache_bytes(gpu.memory, use), None, None)
    assert plan.num_tokens >= 47_000


def test_memory_that_a_failed_capture_keeps_is_not_given_to_the_cache(
    memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps its pool, and the next recording takes another one."""
    monkeypatch.setattr("engine.startup.gpu_profile.run_largest_step", lambda *_: None)
    monkeypatch.setattr("engine.startup.gpu_profile.free_bytes", lambda _: torch.cuda.mem_get_info(META)[0])
    gpu = Gpu(META, TARGETS["sm_89"], 128, GpuMemory("fake", 24 * GIB, 24 * GIB - CONTEXT_BYTES, 0.9))
    ops = GpuOps(META, TARGETS["sm_89"], num_processors=128)
    pool, kept_bytes = object(), 2**20

    def make_runner(_plan: KVCachePlan, has_graphs: bool) -> None:
        if has_graphs:
            memory.pool = pool
            memory.num_graphs[pool] += 1
            _ = torch.empty(kept_bytes, dtype=torch.int8, device=META)
            memory.pool = None
            ops.graphs_bytes = 3 * 2**20

    use = measure_memory(
        gpu,
        ops,
        make_runner,  # type: ignore[arg-type]
        limits=EngineConfig(model="any").step_limits("cuda"),
        has_graphs=True,
        cache=KVCachePlan(1, 16, 0, 64),
        vocab_size=9,
    )
    assert use.graphs_bytes == 3 * 2**20 + kept_bytes
