"""Engines on a simulated GPU answer as on a CPU, with weights of every kind.

tests/engine/test_gpu_serving.py serves requests, on a real GPU too.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.core.request import Adapter, Request, RequestId, SamplingParams
from engine.errors import ConfigError
from engine.parallel.group import SingleRank
from engine.startup.rank import RankTask
from kernels.check import kernel_cases
from kernels.gpu.prefill_plan import PrefillPlan, prefill_plan
from tests.support.engine.adapters import WEIGHTS, save_adapter, save_merged
from tests.support.engine.families import STATEFUL_FAMILIES, TRANSFORMERS_FAMILIES, family_config, save_family
from tests.support.engine.float_checkpoints import quantise_floats
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint
from tests.support.engine.simulated_gpu import FakeGraphs
from tests.support.engine.small_engine import answers, build, run_to_the_end
from tests.support.engine.weights import BLOCK_SIZES, save_block_scaled
from tests.support.kernels.scaled_mm import use_checked_products


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
@pytest.mark.parametrize("family", ["StableLM", "OLMoE", "LFM2", "MiniCPM3"])
def test_a_model_that_transformers_computes_answers_as_on_a_cpu(
    gpu: SimpleNamespace, tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps are recorded, except those of experts, whose shapes depend on the router, and of layers with state."""
    prefix, fields = {**TRANSFORMERS_FAMILIES, **STATEFUL_FAMILIES}[family]
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]} if family == "LFM2" else {}
    save_family(tmp_path, family_config(prefix, **{**fields, "num_hidden_layers": 1, **layers}))
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    FakeGraphs.seen.clear()
    with caplog.at_level("INFO"):
        on_gpu = answers(build(tmp_path, num_gpu_blocks_override=24))
    is_recorded = family in ("StableLM", "MiniCPM3")
    assert bool(FakeGraphs.seen) == is_recorded
    assert ("Steps run without CUDA graphs" in caplog.text) != is_recorded
    assert on_gpu == answers(build(tmp_path, num_gpu_blocks_override=24, device="cpu"))


def check_answers(
    path: Path, quantization: str | None, monkeypatch: pytest.MonkeyPatch, kernels: tuple[str, ...]
) -> None:
    """The tokens of a CPU, if weights are not rounded; with these kernels checked at start, and steps recorded.

    kernels: how their names in the check end.
    """
    use_checked_products(monkeypatch)
    monkeypatch.setattr(
        "engine.startup.kernel_check.kernel_cases",
        lambda *of: [case for case in kernel_cases(*of) if case.kernel.endswith(kernels)],
    )
    FakeGraphs.seen.clear()
    parts = build(path, num_gpu_blocks_override=24, kernel_check="fail", quantization=quantization)
    on_gpu = answers(parts)
    assert FakeGraphs.seen
    if quantization is None:
        assert on_gpu == answers(build(path, num_gpu_blocks_override=24, device="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_mixture_of_experts_answers_as_on_a_cpu(
    gpu: SimpleNamespace, servable: Callable[..., Path], quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are recorded: their shapes do not depend on the router."""
    sizes = {"moe_intermediate_size": 48, "mlp_only_layers": []} if quantization else {"mlp_only_layers": [1]}
    path = servable("qwen3_moe", num_hidden_layers=2, hidden_size=64, **sizes)
    check_answers(path, quantization, monkeypatch, ("mixture of experts",))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_layers_with_state_answer_as_on_a_cpu(
    gpu: SimpleNamespace, servable: Callable[..., Path], quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes and steps with prompts."""
    check_answers(servable("qwen3_5"), quantization, monkeypatch, ("delta_rule", "gate_columns"))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_experts_beside_one_that_all_tokens_share_answer_as_on_a_cpu(
    gpu: SimpleNamespace, servable: Callable[..., Path], quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model whose layers keep states, too."""
    sizes = {"moe_intermediate_size": 48, "mlp_only_layers": []} if quantization else {}
    check_answers(servable("qwen3_next", **sizes), quantization, monkeypatch, ("mixture of experts", "add_shared"))


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
    check_adapters(model_dir, tmp_path, kernel_check="fail", **fields)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Command R", "LFM2"])
def test_so_do_those_of_models_that_transformers_computes(gpu: SimpleNamespace, tmp_path: Path, family: str) -> None:
    """In recorded steps, and in layers with state, which compute the tokens of one request at a time."""
    prefix, fields = {**TRANSFORMERS_FAMILIES, **STATEFUL_FAMILIES}[family]
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]} if family == "LFM2" else {}
    save_family(tmp_path / "base", family_config(prefix, **{**fields, "num_hidden_layers": 1, **layers}))
    (tmp_path / "base" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    check_adapters(
        tmp_path / "base", tmp_path, ("in_proj", "q_proj", "v_proj", "o_proj", "out_proj", "down_proj", "w2")
    )
    assert bool(FakeGraphs.seen) == (family == "Command R")


def check_adapters(
    model_dir: Path,
    folder: Path,
    targets: Sequence[str] = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
    **fields: object,
) -> None:
    """Serves two adapters and the model; compares the tokens with those of merged checkpoints on a CPU."""
    modules = {name.removesuffix(".weight").rpartition(".")[2] for name in load_file(model_dir / WEIGHTS)}
    of_first, of_second = ([one for one in names if one in modules] for names in (targets, ("k_proj", "up_proj", "w1")))
    FakeGraphs.seen.clear()
    adapters = [
        save_adapter(folder / "a", model_dir, rank=4, targets=of_first),
        save_adapter(folder / "b", model_dir, rank=24, seed=2, targets=of_second),
    ]
    merged = [save_merged(folder / f"merged-{adapter.name}", model_dir, adapter) for adapter in adapters]
    parts = build(
        model_dir,
        lora=tuple(f"{adapter.name}={adapter}" for adapter in adapters),
        num_gpu_blocks_override=40,
        max_num_seqs=3,
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
    for number, one in enumerate((merged[0], model_dir, merged[1])):
        alone = build(one, num_gpu_blocks_override=40, device="cpu")
        params = SamplingParams(seed=0, max_tokens=5, temperature=0.0, ignore_end_token=True)
        alone.scheduler.add_request(Request(RequestId(1), tuple(range(5, 14)), params, arrival_s=0.0))
        assert tokens[1 + number] == run_to_the_end(alone)[1]


def test_torch_attention_serves_beside_triton_kernels(gpu: SimpleNamespace, model_dir: Path) -> None:
    parts = build(model_dir, attention_backend="torch", num_gpu_blocks_override=24)
    assert answers(parts) == answers(build(model_dir, device="cpu"))
    assert not FakeGraphs.seen


@pytest.mark.parametrize(("target", "tiles_few_rows"), [("sm_90", True), ("sm_89", False)])
def test_eight_bit_weights_and_cache_serve(
    gpu: SimpleNamespace, model_dir: Path, monkeypatch: pytest.MonkeyPatch, target: str, tiles_few_rows: bool
) -> None:
    gpu.target = target
    products = use_checked_products(monkeypatch)
    parts = build(model_dir, quantization="fp8", kv_cache_dtype="fp8", num_gpu_blocks_override=24, dtype="bfloat16")
    assert [len(tokens) for tokens in answers(parts).values()] == [3, 3, 3]
    num_at_start = 4  # of the check
    assert (len(products) == num_at_start) == tiles_few_rows


@pytest.mark.parametrize(
    ("target", "name"),
    [("sm_75", "fake"), ("sm_80", "the GPU of another rank")],  # a rank that kept its dtype would read other bits
)
def test_a_bfloat16_model_runs_in_float16_on_all_gpus_if_one_has_no_bfloat16(
    gpu: SimpleNamespace,
    servable: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    target: str,
    name: str,
) -> None:
    gpu.target = target
    monkeypatch.setattr(SingleRank, "minimum", lambda *_: 0)
    tasks: list[RankTask] = []

    def record(task: RankTask, *_: object) -> None:
        tasks.append(task)
        raise ConfigError("recorded")

    monkeypatch.setattr("engine.startup.rank._gpu_ops", record)
    with pytest.raises(ConfigError, match="recorded"):
        build(servable(num_hidden_layers=1, dtype="bfloat16"), dtype="auto")
    assert tasks[0].dtype is tasks[0].kv_dtype is torch.float16
    assert f"{name} has no bfloat16: the model runs in float16" in caplog.text


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


@pytest.mark.parametrize(
    "architecture", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)], ids=["dense", "experts"]
)
def test_weights_in_nvfp4_give_the_tokens_of_a_cpu(
    gpu: SimpleNamespace,
    servable: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
) -> None:
    """A GPU has them as integers, which are checked at start; weights are not rounded on either device."""
    monkeypatch.setattr(
        "engine.startup.kernel_check.kernel_cases",
        lambda *of: [case for case in kernel_cases(*of) if "linear after" in case.kernel or "mixture" in case.kernel],
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    if architecture == "llama":
        del sizes["moe_intermediate_size"]
    original = servable(architecture, dtype="float32", **sizes)
    floats, twin = (shutil.copytree(original, tmp_path / name) for name in ("floats", "twin"))
    quantise_floats(original, floats, twin, "modelopt")
    parts = build(floats, num_gpu_blocks_override=24, enforce_eager=True, kernel_check="fail")
    assert answers(parts) == answers(build(floats, device="cpu")) == answers(build(twin, device="cpu"))
