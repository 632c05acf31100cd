"""Matrices of a GGUF file stay in its blocks: their results, memory and shards are those of their numbers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench.gguf_writer import save_twin
from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint import open_checkpoint
from engine.model.config import ModelConfig
from engine.model.gguf_file import QUANTIZED_TYPES
from engine.model.gguf_weights import GgufWeights
from engine.model.loader import check_checkpoint, cpu_checkpoint_dtype, load_model, weights_bytes
from engine.model.model_folder import check_folder
from engine.parallel.group import SingleRank
from kernels.families import cpu_ops, reference_ops
from kernels.interface import KernelOps
from tests.support.engine.gguf import save_random_blocks
from tests.support.engine.weights import PeakBytes, loaded_parts

SIZES = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 41, "num_hidden_layers": 1}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q8_0"}
"""As in Q4_K_M: the types of some matrices differ from those with which they are multiplied."""


def twins(
    make_checkpoint: Any, folder: Path, name: str, kinds: dict[str, str], default: str, **settings: Any
) -> tuple[Path, Path]:
    """A GGUF file with random blocks, and a folder with the numbers that they stand for."""
    original, path, twin = make_checkpoint(name, **SIZES | settings), folder / "model.gguf", folder / "twin"
    save_random_blocks(original, path, kinds, default)
    save_twin(path, original, twin)
    return path, twin


def outputs(path: Path, ops: KernelOps) -> list[torch.Tensor]:
    """Results of the linear layers for random inputs, embeddings and logits."""
    model = load_model(path, ModelConfig.from_dir(path), ops)
    layer = model.layers[0]
    linears = [layer.mixer.qkv, layer.mixer.o, layer.feed_forward.gate_up, layer.feed_forward.down]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(5, size, generator=generator) for size in (256, 256, 256, 512)]
    results = [linear(ops, x) for linear, x in zip(linears, inputs, strict=True)]
    embeddings = ops.gather_rows(model.vocabulary.table, torch.arange(41).flip(0))
    return [*results, embeddings, model.compute_logits(inputs[0])]


@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
@pytest.mark.parametrize(
    ("name", "kinds", "default"),
    [
        *(("qwen2", {}, kind) for kind in QUANTIZED_TYPES),
        ("llama", MIXED, "Q4_K"),
        ("qwen3", {"attn_q.": "F16"}, "Q8_0"),
        ("phi3", {"ffn_up": "Q6_K"}, "Q4_K"),
        ("olmo2", {}, "Q4_0"),
    ],
)
def test_blocks_give_the_results_of_their_numbers(
    make_checkpoint: Any,
    tmp_path: Path,
    name: str,
    kinds: dict[str, str],
    default: str,
    make_ops: Callable[[], KernelOps],
) -> None:
    path, twin = twins(make_checkpoint, tmp_path, name, kinds, default)
    for found, expected in zip(outputs(path, make_ops()), outputs(twin, make_ops()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_a_tied_head_gives_the_results_of_its_numbers(
    make_checkpoint: Any, tmp_path: Path, make_ops: Callable[[], KernelOps]
) -> None:
    path, twin = twins(make_checkpoint, tmp_path, "qwen2", MIXED, "Q4_K", tie_word_embeddings=True)
    for found, expected in zip(outputs(path, make_ops()), outputs(twin, make_ops()), strict=True):
        assert torch.equal(found, expected)


def test_a_scaled_embedding_is_not_in_blocks(make_checkpoint: Any, tmp_path: Path) -> None:
    """The factor would change the roundings."""
    path, _ = twins(make_checkpoint, tmp_path, "llama", {}, "Q4_K")
    config = ModelConfig.from_dir(path)
    scaled = replace(config, traits=replace(config.traits, embedding_scale=12.0))
    model, plain_model = (load_model(path, each, cpu_ops()) for each in (scaled, config))
    indices = torch.arange(41)
    rows, plain_rows = (cpu_ops().gather_rows(each.vocabulary.table, indices) for each in (model, plain_model))
    assert torch.equal(rows, plain_rows * 12.0)


def test_matrices_stay_in_blocks_unless_one_beside_them_is_not(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = twins(make_checkpoint, tmp_path, "qwen2", {"attn_q.": "F16", "ffn_up": "Q6_K"}, "Q4_K")
    config = ModelConfig.from_dir(path)
    stored = config.quantized
    assert isinstance(stored, GgufWeights)
    prefix = "model.layers.0."
    assert stored.kinds == {
        "model.embed_tokens": "Q4_K",
        "lm_head": "Q4_K",
        f"{prefix}self_attn.o_proj": "Q4_K",
        f"{prefix}mlp.gate_proj": "Q4_K",
        f"{prefix}mlp.up_proj": "Q6_K",
        f"{prefix}mlp.down_proj": "Q4_K",
    }
    assert stored.form([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]) == (6, 16)
    assert stored.form([f"{prefix}mlp.down_proj"]) == (4, 32)
    assert (config.checkpoint_dtype, cpu_checkpoint_dtype(path, config)) == ("bfloat16", "float32")


def test_types_that_no_kernel_has_are_loaded_in_8_bits(
    make_checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    kinds = {"ffn_down": "IQ4_XS", "token_embd": "IQ3_S", "attn_v": "TQ2_0"}
    path, twin = twins(make_checkpoint, tmp_path, "llama", kinds, "IQ3_S")
    stored = ModelConfig.from_dir(path).quantized
    assert isinstance(stored, GgufWeights)
    assert set(stored.kinds.values()) == {"IQ4_XS", "Q8_0"}
    with caplog.at_level("INFO"):
        results = outputs(path, reference_ops())
    assert "tensors in IQ3_S, TQ2_0 are dequantised, and the matrices of layers kept in 8 bits" in caplog.text
    expected = outputs(twin, reference_ops())
    for one, other in zip(results, expected, strict=True):
        assert (one - other).norm() < other.norm() / 127, "numbers are rounded to half of 1/127 of the largest"
    assert torch.equal(results[3], expected[3]), "IQ4_XS has no rounding"


def test_types_that_need_a_package_are_refused_without_it(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    save_random_blocks(make_checkpoint("llama", **SIZES), path, {"ffn_up": "IQ3_S"}, "Q8_0")
    monkeypatch.setattr("engine.model.gguf_checkpoint.find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight is IQ3_S, which requires the package gguf"):
        check_folder(path)


@pytest.mark.parametrize("is_tied", [False, True])
def test_memory_is_that_of_the_unpacked_integers(make_checkpoint: Any, tmp_path: Path, is_tied: bool) -> None:
    path, twin = twins(make_checkpoint, tmp_path, "llama", {}, "Q4_K", tie_word_embeddings=is_tied, vocab_size=4096)
    config, plain_config = ModelConfig.from_dir(path), ModelConfig.from_dir(twin)

    def num_bytes(num_weights: int, block_bytes: int | None) -> int:
        return num_weights * 4 if block_bytes is None else num_weights * block_bytes // 256

    layer, matrix = 256 * (256 + 2 * 128 + 256 + 2 * 512 + 512), 256 * 4096
    num_weights = layer + (1 if is_tied else 2) * matrix
    plain_bytes = weights_bytes(plain_config, torch.float32)
    assert weights_bytes(config, torch.float32) == plain_bytes
    norms = plain_bytes - num_bytes(num_weights, None)
    with_table = num_bytes(layer + matrix, 128 + 64) + num_bytes(matrix, None)
    assert weights_bytes(config, torch.float32, kept=(GgufWeights,)) == norms + with_table
    compact = weights_bytes(config, torch.float32, kept=(GgufWeights,), is_compact=True)
    assert compact == norms + num_bytes(num_weights, 128 + 20)
    with PeakBytes() as memory:
        model = load_model(path, config, cpu_ops(), max_model_len=64)
    assert model.vocabulary.shares_head == is_tied
    assert compact <= memory.bytes < 1.1 * compact


@pytest.mark.parametrize(
    ("kinds", "default"), [*(({}, kind) for kind in QUANTIZED_TYPES), ({"attn_v": "Q6_K"}, "Q4_K")]
)
def test_a_cpu_keeps_about_the_bits_of_the_file(
    make_checkpoint: Any, tmp_path: Path, kinds: dict[str, str], default: str
) -> None:
    path, _ = twins(make_checkpoint, tmp_path, "llama", kinds, default)
    config = ModelConfig.from_dir(path)
    layer = load_model(path, config, cpu_ops()).layers[0]
    linears = [layer.mixer.qkv, layer.mixer.o, layer.feed_forward.gate_up, layer.feed_forward.down]
    for linear in linears:
        (packed,) = linear.take_packed()
        num_bytes = packed.weight.nbytes + packed.scales.nbytes + packed.codes.nbytes
        expected = linear.packed_bytes(is_quantized_on_load=False, kept=(GgufWeights,), is_compact=True)
        assert num_bytes <= expected
        assert num_bytes == expected or default == "MXFP4", "whose scales take fewer bytes if fp16 holds them"


@pytest.mark.parametrize(
    ("kinds", "default", "bits"),
    [
        ({}, "Q5_0", 5.5),
        ({}, "Q5_1", 6),
        ({}, "Q5_K", 5.625),
        ({}, "Q6_K", 6.5625),
        ({"attn_v": "Q6_K"}, "Q4_K", 6 + 288 / 256),  # two codes of 16 groups, and two units
        ({"attn_v": "Q5_K"}, "Q3_K", 5 + 288 / 256),
    ],
)
def test_a_cpu_keeps_integers_of_5_and_6_bits_in_as_many(
    make_checkpoint: Any, tmp_path: Path, kinds: dict[str, str], default: str, bits: float
) -> None:
    path, _ = twins(make_checkpoint, tmp_path, "llama", kinds, default)
    (packed,) = load_model(path, ModelConfig.from_dir(path), cpu_ops()).layers[0].mixer.qkv.take_packed()
    num_bytes = packed.weight.nbytes + packed.scales.nbytes + packed.codes.nbytes
    assert 8 * num_bytes == bits * packed.in_features * packed.out_features


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_all_projections_of_a_gated_delta_rule_stay_in_blocks(make_checkpoint: Any, tmp_path: Path, name: str) -> None:
    """Also those of experts, and of the one that all tokens share."""
    experts = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} if name != "qwen3_5" else {}
    experts |= {"mlp_only_layers": [], "norm_topk_prob": True} if name == "qwen3_next" else {}
    folder, path = make_checkpoint(name, intermediate_size=128, **experts), tmp_path / "model.gguf"
    save_random_blocks(folder, path, {"ssm_conv1d": "F32"}, "Q8_0")
    layer = load_model(path, ModelConfig.from_dir(path), cpu_ops()).layers[0]
    assert all(linear.is_quantized for linear in layer.linears)


def test_ranks_hold_shards_of_the_blocks(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = twins(make_checkpoint, tmp_path, "llama", {}, "Q8_0")
    whole = {name: part.tensor for name, part in loaded_parts(path).items()}
    for index in (0, 1):
        group = SingleRank(index, 2)
        parts = loaded_parts(path, group=group)
        for name, dim in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
            name = f"model.layers.0.{name}.weight"
            assert torch.equal(parts[name].tensor, whole[name].chunk(2, dim)[index]), name


def test_ranks_need_whole_blocks(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = twins(make_checkpoint, tmp_path, "llama", {}, "Q4_K")
    group = SingleRank(0, 2)
    with pytest.raises(
        ConfigError, match=r"128 inputs of model\.layers\.0\.self_attn\.o_proj, not .* 256 of a block in Q4_K"
    ):
        check_checkpoint(path, ModelConfig.from_dir(path), torch.float32, group=group)


def test_a_scale_that_is_not_finite_is_refused_by_name(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = twins(make_checkpoint, tmp_path, "llama", {}, "Q8_0")
    entry = open_checkpoint(path).tensors(path)["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[entry.start : entry.start + 2] = b"\x00\x7c"  # infinity in fp16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight holds NaN or infinity"):
        outputs(path, reference_ops())


def test_random_weights_are_not_in_blocks(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = twins(make_checkpoint, tmp_path, "llama", {}, "Q8_0")
    with pytest.raises(ConfigError, match="--load-format dummy is not supported with weights of 8 bits"):
        load_model(path, ModelConfig.from_dir(path), reference_ops(), load_format="dummy")


def test_experts_stay_in_blocks(make_checkpoint: Any, tmp_path: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 2}
    path = tmp_path / "model.gguf"
    save_random_blocks(make_checkpoint("mixtral", **sizes), path, {"ffn_down": "Q6_K"}, "Q4_K")
    stored = ModelConfig.from_dir(path).quantized
    assert isinstance(stored, GgufWeights)
    experts = {name: kind for name, kind in stored.kinds.items() if "experts" in name}
    assert len(experts) == 2 * 4 * 3
    assert experts["model.layers.1.block_sparse_moe.experts.3.w2"] == "Q6_K"
    assert experts["model.layers.1.block_sparse_moe.experts.3.w3"] == "Q4_K"
