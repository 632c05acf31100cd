"""A GGUF file is the model of the folder that it was converted from."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.bench.gguf_writer import Tensor, metadata_of, plain, save_gguf, save_twin, tensors_of, write_gguf
from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint import open_checkpoint
from engine.model.config import ModelConfig
from engine.model.fingerprint import weights_fingerprint
from engine.model.gguf_file import QUANTIZED_TYPES
from engine.model.gguf_weights import GgufWeights
from engine.model.implementation import choose_implementation
from engine.model.loader import check_checkpoint, cpu_checkpoint_dtype, load_model, weights_bytes
from engine.model.model_folder import check_folder, local_model
from engine.model.rotary_tables import rotary_tables
from kernels.dtypes import dtype_name
from kernels.families import cpu_ops, reference_ops
from kernels.interface import KernelOps
from tests.support.engine.gguf import save_random_blocks
from tests.support.engine.weights import PeakBytes, loaded_parts

NAMES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"sliding_window": 24},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 4},
    "granite": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7},
    "olmo2": {},
    "olmo3": {},
    "mixtral": {},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
}
"""Checkpoints of `make_checkpoint`, with what llama.cpp's format can say."""


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: part.tensor for name, part in loaded_parts(path).items()}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("name", "is_tied"),
    [(name, is_tied) for name in NAMES for is_tied in (False, True) if "gemma" not in name or is_tied],
)
def test_configuration_and_weights_are_those_of_the_folder(
    make_checkpoint: Any, tmp_path: Path, name: str, is_tied: bool
) -> None:
    is_tied |= "gemma" in name  # always
    folder, path = make_checkpoint(name, tie_word_embeddings=is_tied, **NAMES[name]), tmp_path / "model.gguf"
    save_gguf(folder, path)
    assert ModelConfig.from_dir(path) == ModelConfig.from_dir(folder)
    assert choose_implementation(path, "auto") == "chairlift"
    found, expected = weights(path), weights(folder)
    if "gemma" in name:  # whose files have the sum that the decoder computes
        norms = [name for name in found if name.endswith("norm.weight")]
        check_equal({name: found.pop(name) + 1 for name in norms}, {name: expected.pop(name) + 1 for name in norms})
    check_equal(found, expected)


def test_biases_of_llama_are_in_the_order_of_their_rows(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("llama", attention_bias=True, mlp_bias=True), tmp_path / "model.gguf"
    save_gguf(folder, path)
    assert ModelConfig.from_dir(path).traits == ModelConfig.from_dir(folder).traits
    check_equal(weights(path), weights(folder))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_16_bits_are_read_as_they_are(make_checkpoint: Any, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    folder, path = make_checkpoint("qwen3"), tmp_path / "model.gguf"
    save_gguf(folder, path, kind)
    rounded = {
        name: tensor.to(dtype).float() if tensor.ndim == 2 else tensor for name, tensor in weights(folder).items()
    }
    check_equal(weights(path), rounded)
    config = ModelConfig.from_dir(path)
    assert config.checkpoint_dtype == dtype_name(dtype)
    assert cpu_checkpoint_dtype(path, config) == "float32", "norms of the checkpoint have more bits"
    save_gguf(make_checkpoint("qwen3", dtype=dtype_name(dtype)), path, kind)
    assert cpu_checkpoint_dtype(path, config) == dtype_name(dtype)


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
    linears = [layer.qkv, layer.o, layer.feed_forward.gate_up, layer.feed_forward.down]
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
    assert stored.form([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]) == (8, 16)
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
    linears = [layer.qkv, layer.o, layer.feed_forward.gate_up, layer.feed_forward.down]
    for linear in linears:
        (packed,) = linear.take_packed()
        num_bytes = packed.weight.nbytes + packed.scales.nbytes + packed.codes.nbytes
        expected = linear.packed_bytes(is_quantized_on_load=False, kept=(GgufWeights,), is_compact=True)
        assert num_bytes <= expected
        assert num_bytes == expected or default == "MXFP4", "whose scales take fewer bytes if fp16 holds them"


def test_ranks_hold_shards_of_the_blocks(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = twins(make_checkpoint, tmp_path, "llama", {}, "Q8_0")
    whole = weights(path)
    for index in (0, 1):
        group: Any = SimpleNamespace(rank=index, size=2)
        parts = loaded_parts(path, group=group)
        for name, dim in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
            name = f"model.layers.0.{name}.weight"
            assert torch.equal(parts[name].tensor, whole[name].chunk(2, dim)[index]), name


def test_ranks_need_whole_blocks(make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = twins(make_checkpoint, tmp_path, "llama", {}, "Q4_K")
    group: Any = SimpleNamespace(rank=0, size=2)
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


def test_a_split_is_one_model(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("llama")
    metadata, tensors = metadata_of(folder), list(tensors_of(folder).items())
    files = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        write_gguf(file, split | (metadata if number == 0 else {}), dict(tensors[number::3]))
    check_equal(weights(files[0]), weights(folder))
    with pytest.raises(CheckpointError, match=r"split\.no is 1: pass the first file, m-00001-of-00003\.gguf"):
        open_checkpoint(files[1]).weights_files()
    shutil.copy(files[0], tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count is 3 and split\.no 0: expected a name like NAME-00001"):
        open_checkpoint(tmp_path / "other.gguf").weights_files()
    files[2].unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf: missing, the split has 3 files"):
        ModelConfig.from_dir(files[0])


def test_the_rotation_of_llama_3_is_its_table(make_checkpoint: Any, tmp_path: Path) -> None:
    """llama.cpp stores divisors of frequencies in place of the rope_scaling from which its converter computes them."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder, path = make_checkpoint("llama", rope_parameters=scaling), tmp_path / "model.gguf"
    frequencies = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    wavelengths = 2 * torch.pi / frequencies
    blend = (64 / wavelengths - 1) / (4 - 1)
    factors = torch.where(wavelengths < 64 / 4, 1.0, torch.where(wavelengths > 64, 8.0, 1 / ((1 - blend) / 8 + blend)))
    tensors = tensors_of(folder) | {"rope_freqs.weight": plain(factors.float(), "F32")}
    write_gguf(path, metadata_of(folder), tensors)
    found, expected = (angles_at_1(source) for source in (path, folder))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)  # a few roundings to float32
    assert (expected < 0.9 * frequencies).any()


def angles_at_1(path: Path) -> torch.Tensor:
    """The rotation of the second token."""
    [rope] = set(ModelConfig.from_dir(path).traits.ropes)
    cos, sin = rotary_tables(rope, 16, 600, torch.device("cpu"))
    return torch.atan2(sin[1], cos[1])


def test_a_linear_and_a_yarn_rotation_are_those_of_config_json(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("qwen2"), tmp_path / "model.gguf"
    metadata, tensors = metadata_of(folder), tensors_of(folder)
    scaling = {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 4.0}
    write_gguf(path, metadata | scaling, tensors)
    [rope] = set(ModelConfig.from_dir(path).traits.ropes)
    assert rope is not None
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)
    scaling |= {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.original_context_length": 512}
    write_gguf(path, metadata | scaling, tensors)
    config = ModelConfig.from_dir(path)
    [rope] = set(config.traits.ropes)
    assert rope is not None
    assert (rope.rope_type, rope.factor, config.max_position_embeddings) == ("yarn", 4.0, 2048)


def test_another_scaling_of_yarn_is_that_of_config_json(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("qwen2"), tmp_path / "model.gguf"
    values = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 128,
        "yarn_beta_fast": 16.0,
        "yarn_beta_slow": 2.0,
        "attn_factor": 0.5,
    }
    scaling = {f"qwen2.rope.scaling.{key}": value for key, value in values.items()}
    write_gguf(path, metadata_of(folder) | scaling, tensors_of(folder))
    [rope] = set(ModelConfig.from_dir(path).traits.ropes)
    assert rope is not None
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    del scaling["qwen2.rope.scaling.attn_factor"]
    scaling["qwen2.rope.scaling.yarn_log_multiplier"] = 1.0
    write_gguf(path, metadata_of(folder) | scaling, tensors_of(folder))
    [rope] = set(ModelConfig.from_dir(path).traits.ropes)
    assert rope is not None
    assert rope.attention_factor == 1


LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128}


def test_the_rotation_of_phi_3_is_its_factors_of_a_part_of_the_head(make_checkpoint: Any, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]}
    rope = {**LONG, **factors, "partial_rotary_factor": 0.75}
    folder = make_checkpoint("phi3", rope_parameters=rope, original_max_position_embeddings=128, sliding_window=None)
    path = tmp_path / "model.gguf"
    save_gguf(folder, path)
    assert ModelConfig.from_dir(path) == ModelConfig.from_dir(folder)
    write_gguf(path, metadata_of(folder) | {"phi3.rope.scaling.attn_factor": 1.5}, tensors_of(folder))
    [found] = set(ModelConfig.from_dir(path).traits.ropes)
    assert found is not None
    assert found.attention_factor == 1.5


def test_any_part_of_a_head_can_be_rotated(make_checkpoint: Any, tmp_path: Path) -> None:
    """Also 30 of 44 dimensions, where 44 * (30 / 44) is a little less than 30."""
    folder, path = make_checkpoint("phi3"), tmp_path / "model.gguf"
    sizes = {"attention.key_length": 44, "attention.value_length": 44, "rope.dimension_count": 30}
    metadata = metadata_of(folder) | {f"phi3.{key}": value for key, value in sizes.items()}
    write_gguf(path, metadata, tensors_of(folder))
    [rope] = set(ModelConfig.from_dir(path).traits.ropes)
    assert rope is not None
    assert rope.rotated_dims(44) == 30


def test_the_scale_of_the_largest_gemma_is_by_its_heads(make_checkpoint: Any, tmp_path: Path) -> None:
    for name, layers in (("gemma2", 46), ("gemma3", 62)):
        folder, path = make_checkpoint(name), tmp_path / "model.gguf"
        write_gguf(path, metadata_of(folder) | {f"{name}.embedding_length": 96}, tensors_of(folder))
        assert ModelConfig.from_dir(path).traits.attention_scale == 16**-0.5
        metadata = metadata_of(folder) | {f"{name}.embedding_length": 96, f"{name}.block_count": layers}
        write_gguf(path, metadata, tensors_of(folder))
        assert ModelConfig.from_dir(path).traits.attention_scale == 24**-0.5


def test_a_scaling_of_gemma_3_is_for_layers_without_a_window(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("gemma3"), tmp_path / "model.gguf"
    values = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.rope.freq_base": 500000.0,
    }
    write_gguf(path, metadata_of(folder) | values, tensors_of(folder))
    traits = ModelConfig.from_dir(path).traits
    assert traits.sliding_windows == (24, None)
    ropes = [(rope.rope_type, rope.factor, rope.theta) for rope in traits.ropes if rope is not None]
    assert ropes == [("default", 1.0, 10000.0), ("linear", 8.0, 500000.0)]
    write_gguf(path, metadata_of(folder) | {"gemma3.attention.sliding_window": 0}, tensors_of(folder))
    assert ModelConfig.from_dir(path).traits.sliding_windows == (None, None)


def test_tokens_that_end_an_answer_come_from_keys_and_texts(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("llama"), tmp_path / "model.gguf"
    tokens = {
        "tokenizer.ggml.tokens": ["<|im_end|>", "<|eot_id|>", "a", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 3],
        "tokenizer.ggml.eot_token_id": 7,
    }
    write_gguf(path, metadata_of(folder) | tokens, tensors_of(folder))
    assert ModelConfig.from_dir(path).end_token_ids == {1, 2, 3, 7}


def test_other_metadata_or_weights_are_another_model(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("llama")
    metadata, tensors = metadata_of(folder), tensors_of(folder)
    paths = [tmp_path / str(number) / "a.gguf" for number in range(4)]
    for path in paths:
        path.parent.mkdir()
    write_gguf(paths[0], metadata, tensors)
    write_gguf(paths[1], metadata, tensors)
    write_gguf(paths[2], metadata | {"general.name": "other"}, tensors)
    write_gguf(paths[3], metadata, tensors | {"output_norm.weight": plain(torch.ones(64), "F32")})
    assert weights_fingerprint(paths[0]) == weights_fingerprint(paths[1])
    assert len({weights_fingerprint(path) for path in paths}) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture is 'mamba', supported in GGUF are llama, mistral3, qwen2, qwen3, qwen3moe, ",
        ),
        ({"general.architecture": 3}, "general.architecture is 3, supported in GGUF"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": -1}, "llama.block_count is -1, expected an integer >= 1"),
        ({"llama.block_count": 2000}, "num_hidden_layers is 2000, the maximum is 1024"),
        (
            {"llama.attention.head_count_kv": [2, 2]},
            "llama.attention.head_count_kv is an array of 2 values, expected",
        ),
        ({"llama.attention.head_count_kv": 3}, "num_attention_heads is 4, not a multiple of num_key_value_heads 3"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8, heads have 16 dimensions"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, heads have 16 dimensions"),
        ({"llama.attention.key_length": 16384}, "llama.attention.value_length is 16, heads have 16384 dimensions"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"llama.expert_count": -1}, "llama.expert_count is -1, expected an integer >= 0"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window is 8, supported in GGUF is 0"),
        (
            {"llama.rope.scaling.type": "longrope"},
            "llama.rope.scaling.type is 'longrope', supported in GGUF are none",
        ),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0, expected a number > 0"),
        ({"split.count": 5000}, "split.count is 5000, the maximum is 1000"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5', supported are 'gpt2'"),
    ],
)
def test_metadata_that_are_not_supported_are_refused_by_name(
    make_checkpoint: Any, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder, path = make_checkpoint("llama"), tmp_path / "model.gguf"
    metadata = {key: value for key, value in (metadata_of(folder) | change).items() if value is not None}
    write_gguf(path, metadata, tensors_of(folder))
    with pytest.raises(CheckpointError, match=f"^{path}: {words}"):
        check_folder(path)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3", {"qwen3.expert_count": 8}, "qwen3.expert_count is 8, supported in GGUF is 0"),
        ("mixtral", {"llama.expert_used_count": 5}, "num_experts_per_tok is 5, num_local_experts is 4"),
        (
            "mixtral",
            {"llama.expert_shared_feed_forward_length": 64},
            "llama.expert_shared_feed_forward_length is 64, supported in GGUF is 0",
        ),
        ("granite", {"granite.rope.scaling.finetuned": False}, "finetuned is False, supported in GGUF is True"),
        ("granite", {"granite.logit_scale": None}, "granite.logit_scale is missing"),
        ("granite", {"granite.expert_count": 8}, "granite.expert_count is 8, supported in GGUF is 0"),
        (
            "mistral",
            {"mistral3.attention.temperature_scale": 0.1},
            "mistral3.attention.temperature_scale is 0.1, supported in GGUF is 0",
        ),
        ("phi3", {"phi3.attention.sliding_window": -1}, "sliding_window is -1, expected an integer >= 0"),
        ("phi3", {"phi3.rope.dimension_count": 32}, "rope.dimension_count is 32, heads have 16 dimensions"),
        ("phi3", {"phi3.rope.dimension_count": 15}, "partial_rotary_factor is .*, which rotates 15 of 16 dimensions"),
        (
            "olmo3",
            {"olmo2.attention.sliding_window_pattern": [True]},
            "sliding_window_pattern has 1 entries, olmo2.block_count is 2",
        ),
        (
            "olmo3",
            {"olmo2.attention.sliding_window_pattern": [1, 2]},
            "sliding_window_pattern is an array of 2 values of another type, expected booleans",
        ),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": 0}, "pattern is 0, expected an integer >= 1"),
        ("gemma3", {"gemma3.block_count": 1 << 30}, "gemma3.block_count is 1073741824, the maximum is 1024"),
        ("gemma2", {"gemma2.final_logit_softcapping": -1.0}, "softcapping is -1.0, expected a number > 0"),
    ],
)
def test_metadata_of_an_architecture_are_refused_by_name(
    make_checkpoint: Any, tmp_path: Path, name: str, change: dict[str, Any], words: str
) -> None:
    folder, path = make_checkpoint(name), tmp_path / "model.gguf"
    metadata = {key: value for key, value in (metadata_of(folder) | change).items() if value is not None}
    write_gguf(path, metadata, tensors_of(folder))
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dir(path)


THREE_EXPERTS = plain(torch.zeros(3, 112, 64), "F32")


def test_experts_of_another_number_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("mixtral"), tmp_path / "model.gguf"
    write_gguf(path, metadata_of(folder), tensors_of(folder) | {"blk.0.ffn_up_exps.weight": THREE_EXPERTS})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_up_exps\.weight is not part of this architecture"):
        weights(path)
    tensors = tensors_of(folder)
    tensors["blk.0.attn_q.1.weight"] = tensors.pop("blk.0.attn_q.weight")
    write_gguf(path, metadata_of(folder), tensors)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_q\.1\.weight is not part of this architecture"):
        weights(path)


def test_too_many_experts_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("mixtral"), tmp_path / "model.gguf"
    metadata = metadata_of(folder) | {"llama.expert_count": 1 << 19}
    tensors = tensors_of(folder) | {"blk.0.ffn_up_exps.weight": plain(torch.zeros(1 << 19, 1, 1), "F16")}
    write_gguf(path, metadata, tensors)
    with pytest.raises(
        CheckpointError, match=r"model\.gguf: tensor blk\.0\.ffn_up_exps\.weight: experts have more than"
    ):
        ModelConfig.from_dir(path)


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


def test_one_table_of_factors_is_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("phi3"), tmp_path / "model.gguf"
    tensors = tensors_of(folder) | {"rope_factors_long.weight": plain(torch.ones(8), "F32")}
    write_gguf(path, metadata_of(folder), tensors)
    with pytest.raises(CheckpointError, match=r"tensor rope_factors_short\.weight is missing"):
        ModelConfig.from_dir(path)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("token_embd.weight", None, "tensor token_embd.weight is missing"),
        (
            "blk.1.attn_q.weight",
            None,
            "1 of 21 tensors are missing, the first is model.layers.1.self_attn.q_proj",
        ),
        ("blk.0.attn_rot_embd.weight", plain(torch.ones(4), "F32"), "tensor blk.0.attn_rot_embd.weight is not part of"),
        ("blk.2.attn_norm.weight", plain(torch.ones(64), "F32"), "tensor blk.2.attn_norm.weight is not part of"),
        ("blk.0.ffn_up.weight", plain(torch.ones(64, 64), "F16"), r"\[64, 64\], the metadata requires \[112, 64\]"),
        ("output_norm.weight", plain(torch.full((64,), torch.nan), "F32"), "tensor output_norm.weight holds NaN"),
        (
            "rope_freqs.weight",
            plain(torch.ones(4), "F32"),
            r"is F32 of shape \[4\], expected F32 of \[8\]",
        ),
        (
            "rope_freqs.weight",
            plain(torch.zeros(8), "F32"),
            r"short_factor is \[0.0, .* expected a list of numb",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    make_checkpoint: Any, tmp_path: Path, name: str, tensor: Tensor | None, words: str
) -> None:
    folder, path = make_checkpoint("llama"), tmp_path / "model.gguf"
    tensors = {key: value for key, value in {**tensors_of(folder), name: tensor}.items() if value is not None}
    write_gguf(path, metadata_of(folder), tensors)
    with pytest.raises(CheckpointError, match=words):
        weights(path)


def test_a_file_is_a_model_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match=r"model\.gguf: no such file or folder"):
        local_model(str(path))
    path.touch()
    assert local_model(str(path)) == path


def test_transformers_reads_no_gguf(make_checkpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(make_checkpoint("llama"), path)
    with pytest.raises(ConfigError, match="--model-impl transformers is not supported for GGUF files, such as"):
        choose_implementation(path, "transformers")
