"""Rotations, windows and scales of attention in a GGUF file are those of config.json."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench.gguf_writer import metadata_of, plain, save_gguf, tensors_of, write_gguf
from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.rotary_tables import rotary_tables


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


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(make_checkpoint: Any, tmp_path: Path, key: str) -> None:
    """In llama.cpp `llama_model_rope_freq_scale_train` is 0.25 for both, and 1 with the type "none"."""
    folder, path = make_checkpoint("llama"), tmp_path / "model.gguf"
    for kind, expected in (({}, ("linear", 4.0)), ({"llama.rope.scaling.type": "none"}, ("default", 1.0))):
        write_gguf(path, metadata_of(folder) | {f"llama.{key}": 4.0} | kind, tensors_of(folder))
        [rope] = set(ModelConfig.from_dir(path).traits.ropes)
        assert rope is not None
        assert (rope.rope_type, rope.factor) == expected


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


def test_one_table_of_factors_is_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    folder, path = make_checkpoint("phi3"), tmp_path / "model.gguf"
    tensors = tensors_of(folder) | {"rope_factors_long.weight": plain(torch.ones(8), "F32")}
    write_gguf(path, metadata_of(folder), tensors)
    with pytest.raises(CheckpointError, match=r"tensor rope_factors_short\.weight is missing"):
        ModelConfig.from_dir(path)
