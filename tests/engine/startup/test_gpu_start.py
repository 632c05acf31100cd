"""The start of an engine on a simulated GPU: memory, refused settings, checks, log lines."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

import kernels.gpu.ops
from engine.errors import ConfigError
from engine.startup.gpu_profile import measure_memory
from kernels.check import kernel_cases
from kernels.gpu.kernel_cache import NoRoomError
from kernels.gpu.launch import load_kernels
from kernels.gpu.ops import GpuOps
from kernels.gpu.step_graphs import StepGraphs
from kernels.metadata import AttentionMetadata
from kernels.reference.ops import ReferenceOps
from tests.support.engine.simulated_gpu import MIB, STEP_BYTES, WEIGHTS_BYTES, FakeGraphs
from tests.support.engine.small_engine import answers, build
from tests.support.kernels.graphs import FakeGraphs as CapturedGraphs
from tests.support.kernels.scaled_mm import use_checked_products


def test_the_cache_gets_the_memory_left_by_context_weights_graphs_and_the_largest_step(
    gpu: SimpleNamespace, model_dir: Path
) -> None:
    gpu.held = MIB  # CUDA context
    parts = build(model_dir, gpu_memory_utilization=0.75)
    block_bytes = 2 * 2 * 16 * 16 * 4  # keys and values of 2 heads of 16, 16 tokens, float32
    # The cache of the largest step: one block for each of 2 requests of 4 tokens.
    step_bytes = STEP_BYTES - 2 * block_bytes
    used_bytes = MIB + WEIGHTS_BYTES + step_bytes + FakeGraphs.num_bytes
    assert parts.info.num_kv_blocks == (48 * MIB - used_bytes) // block_bytes


def test_buffers_are_measured_for_no_longer_requests_than_the_budget_could_hold(
    gpu: SimpleNamespace, servable: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of a runner have a place for every token of every request: of a context of millions they take gigabytes
    that no request can use.
    """
    measured: list[int] = []
    monkeypatch.setattr(
        "engine.startup.gpu_profile.measure_memory",
        lambda *args, **options: measured.append(options["cache"].max_model_len) or measure_memory(*args, **options),
    )
    path = servable(num_hidden_layers=1, max_position_embeddings=400_000)
    parts = build(path, gpu_memory_utilization=0.75, max_model_len=None)
    token_bytes = 2 * 2 * 16 * 4
    assert measured == [48 * MIB // token_bytes]
    assert parts.info.max_model_len == parts.info.num_kv_blocks * 16 < measured[0]


def test_torch_kernels_run_without_graphs_and_pay_for_attention_over_the_longest_context(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_bytes = 7 * MIB
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: WEIGHTS_BYTES)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: WEIGHTS_BYTES + attention_bytes)
    attended: list[tuple[int, int]] = []
    attention = ReferenceOps.paged_attention

    def recorded(q: torch.Tensor, cache: Any, metadata: AttentionMetadata, **options: Any) -> torch.Tensor:
        attended.append((metadata.max_query_len, metadata.max_seq_len))
        return attention(q, cache, metadata, **options)

    monkeypatch.setattr(ReferenceOps, "paged_attention", staticmethod(recorded))
    monkeypatch.setattr("kernels.gpu.ops.GpuOps.__init__", pytest.fail)
    parts = build(model_dir, gpu_memory_utilization=0.75, kernels="torch")
    assert max(attended, key=lambda lens: lens[1]) == (8, 64)  # a full step at the end of the longest request
    block_bytes = 2 * 2 * 16 * 16 * 4
    step_bytes = STEP_BYTES - 2 * block_bytes + attention_bytes
    assert parts.info.num_kv_blocks == (48 * MIB - WEIGHTS_BYTES - step_bytes) // block_bytes
    assert answers(parts) == answers(build(model_dir, device="cpu"))
    assert not FakeGraphs.seen


def test_what_an_attention_library_does_not_support_is_a_config_error(gpu: SimpleNamespace, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer does not support float32"):
        build(model_dir, attention_backend="flashinfer")
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer does not support heads of 16 on sm_90"):
        build(model_dir, attention_backend="flashinfer", dtype="bfloat16")


def test_a_cache_of_a_given_size_is_not_measured(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.gpu_profile.run_largest_step", pytest.fail)
    gpu.held = 32 * MIB
    assert build(model_dir, kv_cache_memory_bytes=2**20).info.num_kv_blocks == 2**20 // 4096
    assert build(model_dir, num_gpu_blocks_override=9).info.num_kv_blocks == 9


@pytest.mark.parametrize(
    ("name", "kernel", "remedy"),
    [
        ("paged_attention", "paged_attention", "use --attention-backend torch or --kernels torch"),
        pytest.param("gate_and_mul", "silu_and_mul", "use --kernels torch", marks=pytest.mark.slow),
    ],
)
def test_a_faulty_kernel_ends_the_start_before_weights_are_read(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, kernel: str, remedy: str
) -> None:
    monkeypatch.setattr("engine.startup.rank.load", pytest.fail)
    monkeypatch.setattr(
        "engine.startup.kernel_check.kernel_cases",
        lambda *of: [case for case in kernel_cases(*of) if kernel in case.kernel and "decode, " not in case.form[:8]],
    )
    right = getattr(kernels.gpu.ops, name)
    monkeypatch.setattr(f"kernels.gpu.ops.{name}", lambda *args, **options: -right(*args, **options))
    with pytest.raises(ConfigError, match=rf"kernel check: .*{kernel} .*float32.* has an error of .* {remedy}, or"):
        build(model_dir, kernel_check="fail", num_gpu_blocks_override=9)


@pytest.mark.parametrize(
    ("fields", "target", "words"),
    [
        ({"quantization": "fp8"}, "sm_80", "--quantization fp8: sm_80 has no 8-bit floats"),
        ({"kv_cache_dtype": "fp8"}, "sm_80", "--kv-cache-dtype fp8: sm_80 has no 8-bit floats"),
        ({"gpu_memory_utilization": 0.001}, "sm_90", "the weights take .* too little"),
        ({"gpu_memory_utilization": 0.1}, "sm_90", "no memory is left for the KV cache.* more than"),
        ({"dtype": "bfloat16"}, "sm_75", "--dtype bfloat16: fake has no bfloat16; use --dtype float16, or auto"),
        ({"quantization": "int8"}, "sm_90", "--quantization int8 is not supported on a GPU: use fp8"),
    ],
)
def test_settings_that_the_gpu_cannot_run_are_config_errors(
    gpu: SimpleNamespace, model_dir: Path, fields: dict[str, object], target: str, words: str
) -> None:
    gpu.target = target
    with pytest.raises(ConfigError, match=words):
        build(model_dir, **fields)


@pytest.mark.parametrize("kernel_check", ["fail", "off"])
def test_a_model_with_heads_that_have_no_kernels_is_a_config_error(
    gpu: SimpleNamespace, servable: Callable[..., Path], kernel_check: str
) -> None:
    path = servable(num_hidden_layers=1, head_dim=576)
    with pytest.raises(ConfigError, match=r"up to 512, these have 576: use --attention-backend torch"):
        build(path, kernel_check=kernel_check, num_gpu_blocks_override=9)


def test_a_checkpoint_with_scales_per_channel_is_refused_with_batch_invariance_but_on_sm_90(
    gpu: SimpleNamespace, servable: Callable[..., Path], tmp_path: Path
) -> None:
    path = shutil.copytree(servable(num_hidden_layers=1), tmp_path / "channels")
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (path / "config.json").write_text(json.dumps(config))
    gpu.target = "sm_89"
    with pytest.raises(ConfigError, match=r"scales per tensor or output channel .* with --batch-invariant on sm_89"):
        build(path, batch_invariant=True)


def test_8_bit_products_that_torch_lacks_are_refused_before_loading(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    use_checked_products(monkeypatch)
    monkeypatch.setattr(torch, "_scaled_mm", fails)
    monkeypatch.setattr("engine.startup.rank.load", pytest.fail)
    with pytest.raises(ConfigError, match=r"--quantization fp8: torch .* in float32 on fake .*--dtype bfloat16"):
        build(model_dir, quantization="fp8")


def test_a_gpu_with_too_little_free_memory_is_reported_before_loading(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.startup.rank.load", pytest.fail)
    gpu.held = 32 * MIB
    with pytest.raises(
        ConfigError, match=r"--gpu-memory-utilization 0\.92 asks for .* at most --gpu-memory-utilization 0\.56"
    ):
        build(model_dir)


def test_a_largest_step_that_does_not_fit_names_the_flags(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nAdvice")

    monkeypatch.setattr("engine.startup.gpu_profile.run_largest_step", run_out)
    with pytest.raises(ConfigError, match=r"2 requests and 8 tokens, .* 9\.00 GiB\. Lower --max-num-batched-tokens"):
        build(model_dir)


def test_a_full_disk_for_compiled_kernels_is_a_config_error(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise NoRoomError(OSError(28, "No space left on device"))

    monkeypatch.setattr("kernels.gpu.ops.GpuOps.compile_step", run_out)
    with pytest.raises(ConfigError, match=r"cannot be compiled: No space left on device; make room in .* TMPDIR"):
        build(model_dir)


def test_a_kernel_that_does_not_fit_the_gpu_is_a_config_error(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TooLarge:
        name = "_prefill_attention_kernel"

        @property
        def run(self) -> None:
            raise OutOfResources(106_496, 101_376, "shared memory")

    monkeypatch.setattr("kernels.gpu.ops.load_kernels", lambda _: load_kernels([TooLarge()]))
    message = (
        r"kernel _prefill_attention_kernel needs 106496 bytes of shared memory, the GPU has 101376\. Use --kernels"
    )
    with pytest.raises(ConfigError, match=message):
        build(model_dir)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # padding of eager steps is what memory held
@pytest.mark.parametrize("num_gpu_blocks_override", [pytest.param(None, marks=pytest.mark.slow), 24])
def test_captures_that_fail_are_one_warning_and_change_no_answer(
    gpu: SimpleNamespace,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_gpu_blocks_override: int | None,
) -> None:
    graphs = CapturedGraphs()
    for name in (
        "CUDAGraph",
        "graph",
        "graph_pool_handle",
        "synchronize",
        "empty_cache",
        "current_stream",
        "set_stream",
    ):
        monkeypatch.setattr(torch.cuda, name, graphs.patches()[name])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", graphs.end_allocation)
    compile_step = GpuOps.compile_step
    monkeypatch.setattr(
        GpuOps,
        "compile_step",
        lambda ops, step, *args, **options: compile_step(ops, graphs.recordable(step), *args, **options),
    )
    monkeypatch.setattr("kernels.gpu.ops.StepGraphs", StepGraphs)
    graphs.failing = {
        8: torch.OutOfMemoryError("CUDA out of memory.\nAdvice"),
        1: RuntimeError("not permitted\nAdvice"),
    }
    parts = build(model_dir, num_gpu_blocks_override=num_gpu_blocks_override)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line for line in warnings if "graphs" in line] == [
        "Recording some CUDA graphs failed. These steps run eagerly, slower; --enforce-eager starts without graphs. "
        "decode steps (rows: 1): not permitted; steps with prompts (tokens: 8): CUDA out of memory."
    ]
    assert answers(parts) == answers(build(model_dir, device="cpu"))
    assert set(graphs.replayed) == {2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["Compiling kernels and measuring the largest step took", "Recording CUDA graphs took"]),
        ({"enforce_eager": True}, ["Compiling kernels and measuring the largest step took"]),
        ({"num_gpu_blocks_override": 9}, ["Compiling kernels and recording CUDA graphs took"]),
        ({"num_gpu_blocks_override": 9, "enforce_eager": True}, ["Compiling kernels took"]),
    ],
)
def test_every_phase_of_the_start_logs_one_line(
    gpu: SimpleNamespace, model_dir: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, object], words: list[str]
) -> None:
    with caplog.at_level("INFO"):
        build(model_dir, **fields)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("engine")]
    phases = [
        "Starting to load model",
        "Loading and packing weights took",
        *words,
        "KV cache size",
        "Maximum concurrency",
    ]
    assert [phase for line in lines for phase in phases if line.startswith(phase)] == phases
    assert sum("took" in line for line in lines) == 1 + len(words)
