"""CPU time of kernel launches in a decode layer on a GPU; needs Triton, but no GPU.

Claim: steps that are not replayed as CUDA graphs, such as all steps with a prompt, take little CPU time per layer.

Goal: at most 20 us per layer for the launches of our own kernels in a decode step of llama-3.1-8b.

Method: the operations of a layer other than matrix products (rotate_and_store, paged_attention with divided rows,
add_rms_norm twice, gate_and_mul) for 16 rows, with Triton's compile-only driver, whose launches end where the driver
would be called. Their launches are recorded and repeated, through `BoundKernel` and through Triton's dispatch; then the
whole operations are repeated, with checks and allocations. A sample is the CPU time of a layer, the mean of many.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from engine.model.config import ModelConfig
from engine.model.shapes import find_shape
from kernels.gpu.compile_only_driver import use_compile_only_driver
from kernels.gpu.launch import BoundKernel, compile_only
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS
from kernels.metadata import AttentionMetadata

_MODEL, _TARGET = "llama-3.1-8b", "sm_90"
_NUM_ROWS, _CONTEXT_LEN, _BLOCK_SIZE = 16, 1024, 16
_NUM_PROCESSORS = 132
_GOAL_US = 20.0
_LAUNCHES, _DISPATCHED = "launches", "launches by Triton's dispatch"
_LAYER, _DISPATCHED_LAYER = "operations", "operations by Triton's dispatch"

_Launch = tuple[BoundKernel, tuple[int, ...], tuple[Any, ...]]


def run(settings: Settings) -> Outcome:
    """Compiles the kernels, then measures."""
    try:
        use_compile_only_driver(TARGETS[_TARGET])
    except RuntimeError as error:
        raise BenchmarkError(str(error)) from error
    num_layers = 20 if settings.quick else 1000
    layer = _layer()
    with compile_only():
        layer()
    layer()  # the first layer of a step, which also launches what all layers share
    launches = _recorded(layer)

    def repeat(call: Callable[[], object]) -> float:
        start_ns = time.thread_time_ns()
        for _ in range(num_layers):
            call()
        return (time.thread_time_ns() - start_ns) / num_layers / 1e3

    def repeat_dispatched() -> float:
        with mock.patch.object(BoundKernel, "__call__", BoundKernel.dispatch):
            return repeat(layer)

    def launch() -> None:
        for kernel, grid, args in launches:
            kernel(grid, *args)

    def dispatch() -> None:
        for kernel, grid, args in launches:
            kernel.dispatch(grid, *args)

    samples = alternate(
        {
            _LAUNCHES: partial(repeat, launch),
            _DISPATCHED: partial(repeat, dispatch),
            _LAYER: partial(repeat, layer),
            _DISPATCHED_LAYER: repeat_dispatched,
        },
        rounds=settings.rounds,
        progress=settings.progress,
    )
    results = [
        Result(
            "launches",
            f"{name} of a decode layer, CPU time",
            samples.median(name),
            "us",
            goal=_GOAL_US if name == _LAUNCHES else None,
            direction="at most",
            note=f"{len(launches)} launches, {_MODEL}, {_NUM_ROWS} rows" if name == _LAUNCHES else "",
        )
        for name in samples.raw
    ]
    for ours, dispatched in ((_LAUNCHES, _DISPATCHED), (_LAYER, _DISPATCHED_LAYER)):
        ratio = samples.ratio(dispatched, ours)
        results.append(Result("launches", f"{ours}: by Triton's dispatch over ours", ratio.best, "x", note=str(ratio)))
    return Outcome(tuple(results), raw={"layer_us": samples.raw})


def _layer() -> Callable[[], None]:
    """Returns a function that launches the kernels of one layer, on memory of the host that no kernel touches."""
    folder = find_shape(_MODEL)
    assert folder is not None, f"no shape {_MODEL}"
    config = ModelConfig.from_dir(folder)
    dtype, device = torch.bfloat16, torch.device("cpu")
    ops = GpuOps(device, TARGETS[_TARGET], num_processors=_NUM_PROCESSORS)
    blocks_per_row = _CONTEXT_LEN // _BLOCK_SIZE
    cache = ops.make_kv_cache(blocks_per_row, _BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
    numbers = torch.zeros(_NUM_ROWS, dtype=torch.int64)
    metadata = AttentionMetadata(
        query_start_loc=torch.zeros(_NUM_ROWS + 1, dtype=torch.int32),
        seq_lens=torch.zeros(_NUM_ROWS, dtype=torch.int32),
        block_table=torch.zeros(_NUM_ROWS, blocks_per_row, dtype=torch.int32),
        slot_mapping=numbers,
        block_size=_BLOCK_SIZE,
        max_query_len=1,
        max_seq_len=_CONTEXT_LEN,
        num_one_token_reqs=_NUM_ROWS,
    )
    qkv = torch.zeros(_NUM_ROWS, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, dtype=dtype)
    hidden = torch.zeros(_NUM_ROWS, config.hidden_size, dtype=dtype)
    weight = torch.zeros(config.hidden_size, dtype=dtype)
    gate_up = torch.zeros(_NUM_ROWS, 2 * config.intermediate_size, dtype=dtype)
    table = torch.zeros(_CONTEXT_LEN, config.head_dim // 2)

    def layer() -> None:
        q = ops.rotate_and_store(qkv, numbers, table, table, cache, metadata.slot_mapping)
        ops.paged_attention(q, cache, metadata, scale=config.head_dim**-0.5)
        ops.add_rms_norm(hidden, hidden, weight, config.rms_norm_eps)
        ops.gate_and_mul(gate_up, "silu_and_mul")
        ops.add_rms_norm(hidden, hidden, weight, config.rms_norm_eps)

    return layer


def _recorded(layer: Callable[[], None]) -> list[_Launch]:
    """Returns the launches of a layer."""
    launches: list[_Launch] = []

    def record(kernel: BoundKernel, grid: tuple[int, ...], *args: Any) -> None:
        launches.append((kernel, grid, args))

    with mock.patch.object(BoundKernel, "__call__", record):
        layer()
    return launches
