"""The start of an engine on a simulated GPU: memory, refused settings, checks, log lines.

tests/engine/test_gpu_serving.py serves requests, on a real GPU too.
"""

import json
import shutil
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels.gpu.ops
from engine.config import EngineConfig
from engine.core.outputs import SchedulerOutput
from engine.core.request import Adapter, Request, RequestId, SamplingParams
from engine.errors import ConfigError
from engine.serving.parts import EngineParts
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress
from engine.startup.rank import RankTask
from kernels.check import kernel_cases
from kernels.gpu.kernel_cache import NoRoomError
from kernels.gpu.ops import GpuOps
from kernels.gpu.prefill_plan import PrefillPlan, prefill_plan
from kernels.gpu.step_graphs import StepGraphs
from kernels.metadata import AttentionMetadata
from kernels.reference.ops import ReferenceOps
from tests.support.engine.adapters import save_adapter, save_merged
from tests.support.engine.families import TRANSFORMERS_FAMILIES, family_config, save_family
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint
from tests.support.engine.simulated_gpu import MIB, STEP_BYTES, WEIGHTS_BYTES, FakeGraphs, simulate_gpu
from tests.support.engine.weights import BLOCK_SIZES, save_block_scaled
from tests.support.kernels.graphs import FakeGraphs as CapturedGraphs
from tests.support.kernels.scaled_mm import use_checked_products

if torch.cuda.is_available():
    pytest.skip("kernels are not interpreted beside a GPU: hide it with CUDA_VISIBLE_DEVICES=", allow_module_level=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A simulated GPU."""
    return simulate_gpu(monkeypatch)


@pytest.fixture(scope="module")
def model_dir(servable: Callable[..., Path]) -> Path:
    return servable(num_hidden_layers=1)


def build(model_dir: Path, **fields: object) -> EngineParts:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "dtype": "float32"}
    limits |= {"kernel_check": "off", **fields}  # the interpreter takes seconds for it
    return build_engine(EngineConfig(model=str(model_dir), **limits), StartupProgress())  # type: ignore[arg-type]


def answers(parts: EngineParts) -> dict[int, list[int]]:
    """Returns the tokens of three requests that share steps, by request."""
    for number in range(3):
        prompt_ids = tuple(range(5 + number, 12 + 6 * number))
        params = SamplingParams(seed=number, max_tokens=3, temperature=0.0 if number else 0.9, ignore_end_token=True)
        parts.scheduler.add_request(Request(RequestId(1 + number), prompt_ids, params, arrival_s=0.0))
    return run_to_the_end(parts)


def run_to_the_end(parts: EngineParts) -> dict[int, list[int]]:
    """Computes all requests of the scheduler; returns their tokens, by request."""
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    in_flight: deque[SchedulerOutput] = deque()
    while parts.scheduler.has_work() or in_flight:
        if parts.scheduler.has_work():
            in_flight.append(parts.scheduler.schedule(0.0))
            parts.runner.launch(in_flight[-1])
        if len(in_flight) == parts.scheduler.max_steps_in_flight or not parts.scheduler.has_work():
            for output in parts.scheduler.update(in_flight.popleft(), parts.runner.collect(), 0.0):
                tokens[output.request_id] += output.token_ids
    return tokens


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


def test_torch_kernels_run_without_graphs_and_pay_for_attention_over_the_longest_context(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_bytes = 7 * MIB
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: WEIGHTS_BYTES)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: WEIGHTS_BYTES + attention_bytes)
    attended: list[tuple[int, int]] = []
    attention = ReferenceOps.paged_attention

    def recorded(q: torch.Tensor, cache: object, metadata: AttentionMetadata, **options: Any) -> torch.Tensor:
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


@pytest.mark.slow
def test_a_prompt_chunk_behind_a_long_prefix_divides_its_keys_and_answers_as_on_a_cpu(
    gpu: SimpleNamespace, servable: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last 40 tokens of 1,064 are few tiles with many keys, which are computed in several chunks and merged."""
    num_divided: list[int] = []

    def recorded(*args: Any, **sizes: Any) -> PrefillPlan:
        plan = prefill_plan(*args, **sizes)
        num_divided.append(int(plan.rows[4, -1]) if plan.max_divided_tiles else 0)
        return plan

    monkeypatch.setattr("kernels.gpu.prefill_attention.prefill_plan", recorded)
    model_dir = servable(num_hidden_layers=1, max_position_embeddings=1088)
    limits = {"max_model_len": 1088, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 70}
    tokens = []
    for device in ("cuda", "cpu"):
        parts = build(model_dir, device=device, **limits)
        num_divided.clear()
        prompt_ids = tuple(5 + n * n % 90 for n in range(1064))
        params = SamplingParams(seed=0, max_tokens=2, temperature=0.0, ignore_end_token=True)
        parts.scheduler.add_request(Request(RequestId(1), prompt_ids, params, arrival_s=0.0))
        tokens.append(run_to_the_end(parts)[1])
        assert bool(max(num_divided, default=0)) == (device == "cuda")
    assert len(tokens[0]) == 2
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["StableLM", "OLMoE"])
def test_a_model_that_transformers_computes_answers_as_on_a_cpu(
    gpu: SimpleNamespace, tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps are recorded, except those of experts, whose shapes depend on the router."""
    prefix, fields = TRANSFORMERS_FAMILIES[family]
    save_family(tmp_path, family_config(prefix, **{**fields, "num_hidden_layers": 1}))
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    FakeGraphs.seen.clear()
    with caplog.at_level("INFO"):
        on_gpu = answers(build(tmp_path, num_gpu_blocks_override=24))
    assert bool(FakeGraphs.seen) == (family == "StableLM")
    assert ("Steps run without CUDA graphs" in caplog.text) == (family == "OLMoE")
    assert on_gpu == answers(build(tmp_path, num_gpu_blocks_override=24, device="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_mixture_of_experts_answers_as_on_a_cpu(
    gpu: SimpleNamespace, servable: Callable[..., Path], quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its kernels checked at start, and its steps recorded: their shapes do not depend on the router."""
    use_checked_products(monkeypatch)
    sizes = {"moe_intermediate_size": 48, "mlp_only_layers": []} if quantization else {"mlp_only_layers": [1]}
    path = servable("qwen3_moe", num_hidden_layers=2, hidden_size=64, **sizes)
    monkeypatch.setattr(
        "engine.startup.kernel_check.kernel_cases",
        lambda *of: [case for case in kernel_cases(*of) if case.kernel == "mixture of experts"],
    )
    FakeGraphs.seen.clear()
    parts = build(path, num_gpu_blocks_override=24, kernel_check="fail", quantization=quantization)
    on_gpu = answers(parts)
    assert FakeGraphs.seen
    if quantization is None:
        assert on_gpu == answers(build(path, num_gpu_blocks_override=24, device="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "fields"),
    [
        (Scheme("gptq", shuffled=True), {}),
        (Scheme("awq"), {"batch_invariant": True}),
        (Scheme("int8", num_bits=8, group_size=-1, symmetric=True), {}),
    ],
    ids=["gptq", "awq, batch-invariant", "compressed-tensors"],
)
def test_a_mixture_of_experts_in_integers_gives_the_tokens_of_a_cpu(
    gpu: SimpleNamespace,
    servable: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: Scheme,
    fields: dict[str, object],
) -> None:
    """Experts are checked at start, and steps recorded; weights are not rounded on either device."""
    monkeypatch.setattr(
        "engine.startup.kernel_check.kernel_cases",
        lambda *of: [case for case in kernel_cases(*of) if case.kernel == "mixture of experts"],
    )
    original = servable("qwen3_moe", dtype="float32", hidden_size=64, intermediate_size=128, moe_intermediate_size=64)
    integers, twin = (shutil.copytree(original, tmp_path / name) for name in ("integers", "twin"))
    quantise_checkpoint(original, integers, twin, scheme)
    FakeGraphs.seen.clear()
    parts = build(integers, num_gpu_blocks_override=24, kernel_check="fail", **fields)
    on_gpu = answers(parts)
    assert FakeGraphs.seen
    assert on_gpu == answers(build(integers, device="cpu")) == answers(build(twin, device="cpu"))


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"kernels": "torch"}, marks=pytest.mark.slow)], ids=["triton", "torch"]
)
def test_adapters_give_the_tokens_of_merged_checkpoints(
    gpu: SimpleNamespace,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object],
) -> None:
    """Two adapters and requests without one share recorded steps, two of them in flight; kernels are checked."""
    monkeypatch.setattr(
        "engine.startup.kernel_check.kernel_cases",
        lambda *of: [case for case in kernel_cases(*of) if case.kernel == "add_adapters"],
    )
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    adapters = [
        save_adapter(tmp_path / "a", model_dir, rank=4, targets=targets),
        save_adapter(tmp_path / "b", model_dir, rank=24, seed=2, targets=("k_proj", "up_proj")),
    ]
    merged = [save_merged(tmp_path / f"merged-{adapter.name}", model_dir, adapter) for adapter in adapters]
    parts = build(
        model_dir,
        lora=tuple(f"{adapter.name}={adapter}" for adapter in adapters),
        num_gpu_blocks_override=40,
        max_num_seqs=3,
        kernel_check="fail",
        **fields,
    )
    digests = {adapter.name: adapter.sha256 for adapter in parts.info.adapters}
    chosen = [Adapter(0, digests["a"]), None, Adapter(1, digests["b"])]
    for number, adapter in enumerate(chosen):
        params = SamplingParams(seed=0, max_tokens=5, temperature=0.0, ignore_end_token=True)
        prompt_ids = tuple(range(5, 14))
        parts.scheduler.add_request(Request(RequestId(1 + number), prompt_ids, params, arrival_s=0.0, adapter=adapter))
    tokens = run_to_the_end(parts)
    assert len({tuple(answer) for answer in tokens.values()}) == 3
    for number, folder in enumerate((merged[0], model_dir, merged[1])):
        alone = build(folder, num_gpu_blocks_override=40, device="cpu")
        params = SamplingParams(seed=0, max_tokens=5, temperature=0.0, ignore_end_token=True)
        alone.scheduler.add_request(Request(RequestId(1), tuple(range(5, 14)), params, arrival_s=0.0))
        assert tokens[1 + number] == run_to_the_end(alone)[1]


def test_torch_attention_serves_beside_triton_kernels(gpu: SimpleNamespace, model_dir: Path) -> None:
    parts = build(model_dir, attention_backend="torch", num_gpu_blocks_override=24)
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


def test_eight_bit_weights_and_cache_serve(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = use_checked_products(monkeypatch)
    parts = build(model_dir, quantization="fp8", kv_cache_dtype="fp8", num_gpu_blocks_override=24, dtype="bfloat16")
    assert [len(tokens) for tokens in answers(parts).values()] == [3, 3, 3]
    assert len(products) > 4  # those of the check at start


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("paged_attention", "use --attention-backend torch or --kernels torch"),
        pytest.param("silu_and_mul", "use --kernels torch", marks=pytest.mark.slow),
    ],
)
def test_a_faulty_kernel_ends_the_start_before_weights_are_read(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.setattr("engine.startup.rank.load", pytest.fail)
    monkeypatch.setattr(
        "engine.startup.kernel_check.kernel_cases",
        lambda *of: [case for case in kernel_cases(*of) if name in case.kernel and "decode, " not in case.form[:8]],
    )
    right = getattr(kernels.gpu.ops, name)
    monkeypatch.setattr(f"kernels.gpu.ops.{name}", lambda *args, **options: -right(*args, **options))
    with pytest.raises(ConfigError, match=rf"kernel check: .*{name} .*float32.* has an error of .* {remedy}, or"):
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


def test_a_bfloat16_model_runs_in_float16_on_a_gpu_without_bfloat16(
    gpu: SimpleNamespace,
    servable: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu.target = "sm_75"
    tasks: list[RankTask] = []

    def record(task: RankTask, *_: object) -> None:
        tasks.append(task)
        raise ConfigError("recorded")

    monkeypatch.setattr("engine.startup.rank._gpu_ops", record)
    with pytest.raises(ConfigError, match="recorded"):
        build(servable(num_hidden_layers=1, dtype="bfloat16"), dtype="auto")
    assert tasks[0].dtype is tasks[0].kv_dtype is torch.float16
    assert "fake has no bfloat16: the model runs in float16" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ("sm_90", {"batch_invariant": True}),
        ("sm_80", {}),
        ("sm_90", {"quantization": "fp8", "dtype": "bfloat16"}),
    ],
)
def test_block_scaled_weights_serve(
    gpu: SimpleNamespace,
    servable: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    target: str,
    fields: dict[str, object],
) -> None:
    """Without 8-bit floats too, and beside other layers that are quantised on load; they are checked at start."""
    gpu.target = target
    use_checked_products(monkeypatch)
    monkeypatch.setattr(
        "engine.startup.kernel_check.kernel_cases",
        lambda *of: [case for case in kernel_cases(*of) if "linear after" in case.kernel],
    )
    path = save_block_scaled(servable(num_hidden_layers=1, dtype="bfloat16", **BLOCK_SIZES), tmp_path / "blocks")
    parts = build(path, num_gpu_blocks_override=24, enforce_eager=True, kernel_check="fail", **fields)
    tokens = answers(parts)
    assert [len(answer) for answer in tokens.values()] == [3, 3, 3]
    if target == "sm_80":
        assert tokens == answers(build(path, device="cpu"))  # inputs in float32 are not rounded


@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({"batch_invariant": True}, marks=pytest.mark.slow)],
    ids=["fast", "batch-invariant"],
)
def test_integers_give_the_tokens_of_a_cpu(
    gpu: SimpleNamespace,
    servable: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object],
) -> None:
    """Linear layers are checked at start; weights are not rounded on either device."""
    monkeypatch.setattr(
        "engine.startup.kernel_check.kernel_cases",
        lambda *of: [case for case in kernel_cases(*of) if "linear after" in case.kernel],
    )
    original = servable(num_hidden_layers=1, dtype="float32", hidden_size=64, intermediate_size=128)
    integers, twin = (shutil.copytree(original, tmp_path / name) for name in ("integers", "twin"))
    quantise_checkpoint(original, integers, twin, Scheme("gptq", shuffled=True))
    parts = build(integers, num_gpu_blocks_override=24, enforce_eager=True, kernel_check="fail", **fields)
    assert answers(parts) == answers(build(integers, device="cpu")) == answers(build(twin, device="cpu"))


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
