"""GGUF files of architectures that transformers computes are the models of the folders that they were made of."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.bench.shapes import write_tokenizer
from engine.bench.gguf_writer import plain, save_twin, write_gguf
from engine.core.request import SamplingParams
from engine.errors import CheckpointError, ConfigError
from engine.model.gguf_weights import GgufWeights
from engine.model.implementation import choose_implementation
from engine.model.transformers_probe import TransformersConfig
from tests.support.engine.families import FAMILIES, family_config, save_family
from tests.support.engine.gguf import random_blocks
from tests.support.engine.gguf_families import WRITTEN, family_metadata, family_tensors, save_family_gguf
from tests.support.engine.greedy import random_prompts
from tests.support.engine.small_engine import answers_with_flags

PARAMS = SamplingParams(seed=7, max_tokens=24, temperature=1.0, ignore_end_token=True)
QUICK = "Command R7B"


def save(folder: Path, name: str, **fields: Any) -> Path:
    prefix, own_fields = FAMILIES[name]
    save_family(folder, family_config(prefix, **{**own_fields, **WRITTEN[name].fields, **fields}))
    write_tokenizer(folder, 307)
    return folder


def answers(model: Path) -> list[Any]:
    """At temperature 1, because greedy answers repeat themselves."""
    return answers_with_flags(model, random_prompts((1, 5, 16, 33, 80)), PARAMS, "--kv-cache-memory-bytes", "64M")


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WRITTEN]
)
def test_answers_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    folder, path = save(tmp_path / "folder", name), tmp_path / "model.gguf"
    save_family_gguf(folder, path, WRITTEN[name])
    assert choose_implementation(path, "auto") == "transformers"
    found = answers(path)
    assert found == answers(folder)
    assert len({token for answer in found for token in answer.token_ids}) > 20


def test_without_a_window_all_layers_rotate(tmp_path: Path) -> None:
    """As in EXAONE 4 1.2B; the class of transformers has a window by default."""
    types = ["full_attention"] * 4
    folder = save(tmp_path / "folder", "EXAONE 4", sliding_window=None, layer_types=types)
    save_family_gguf(folder, tmp_path / "model.gguf", WRITTEN["EXAONE 4"])
    assert answers(tmp_path / "model.gguf") == answers(folder)


@pytest.mark.parametrize(
    "name",
    [
        "Seed-OSS",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Arcee", "GLM-4.5", "LFM2", "LFM2-MoE")),
    ],
)
def test_linear_layers_and_experts_stay_in_blocks(name: str, tmp_path: Path) -> None:
    """Arcee's queries and keys have rows in another order; experts have other names in LFM2-MoE."""
    folder, path = save(tmp_path / "folder", name, moe_intermediate_size=64), tmp_path / "model.gguf"
    tensors, generator = family_tensors(folder, WRITTEN[name]), torch.Generator().manual_seed(0)
    for key, tensor in tensors.items():
        if len(tensor.shape) > 1 and "conv.conv" not in key and "ffn_gate_inp" not in key:
            kind = "Q4_0" if "attn_v" in key or "exps" in key else "Q8_0"
            blocks = random_blocks(kind, math.prod(tensor.shape[:-1]), tensor.shape[-1], generator)
            tensors[key] = blocks._replace(shape=tensor.shape)
    write_gguf(path, family_metadata(folder, WRITTEN[name]), tensors)
    config = TransformersConfig.from_dir(path)
    assert isinstance(config.quantized, GgufWeights)
    assert set(config.linear_layers) <= set(config.quantized.kinds)
    assert config.tied_head is not None or "lm_head" in config.linear_layers
    assert all(any(kept.startswith(f"{module}.3.") for kept in config.quantized.kinds) for module in config.experts)
    dtypes = {"dtype": torch.float32, "model_dtype": torch.float32}
    stays = config.packed_bytes(**dtypes, is_quantized=False, kept=(GgufWeights,), is_compact=True)
    others = 4 * 307 * 64  # the embedding, which is not in blocks
    assert stays < others + 0.5 * (config.packed_bytes(**dtypes, is_quantized=False, kept=()) - others)
    save_twin(path, folder, tmp_path / "twin")
    assert answers(path) == answers(tmp_path / "twin")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attn_q.bias", r"tensor blk\.1\.attn_q\.bias is not part of this architecture"),
        ("attn_q_norm.weight", r"1 tensors are unexpected, the first is model\.layers\.1\.self_attn\.q_norm\.weight"),
        ("attn_sinks.weight", r"1 tensors are unexpected, the first is blk\.1\.attn_sinks\.weight"),
    ],
)
def test_tensors_that_transformers_does_not_know_are_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    folder, path = save(tmp_path / "folder", "ERNIE 4.5"), tmp_path / "model.gguf"
    tensors = family_tensors(folder, WRITTEN["ERNIE 4.5"]) | {f"blk.1.{name}": plain(torch.ones(64), "F32")}
    write_gguf(path, family_metadata(folder, WRITTEN["ERNIE 4.5"]), tensors)
    with pytest.raises(CheckpointError, match=words):
        answers(path)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("GLM-4.5", {"glm4moe.expert_gating_func": 1}, "expert_gating_func is 1, supported in GGUF is 2"),
        ("GLM-4.5", {"glm4moe.expert_count": 0}, "glm4moe.expert_count is 0, expected an integer >= 1"),
        ("Command R", {"command-r.logit_scale": None}, "command-r.logit_scale is missing"),
        ("Command R7B", {"cohere2.attention.sliding_window_pattern": 0}, "pattern is 0, expected an integer >= 1"),
        ("Command R7B", {"cohere2.expert_count": 4}, "cohere2.expert_count is 4, supported in GGUF is 0"),
        ("Hunyuan", {"hunyuan-dense.attention.sliding_window": 8}, "sliding_window is 8, supported in GGUF is 0"),
        (
            "Ministral 3",
            {"mistral3.rope.scaling.type": "none"},
            "rope.scaling.type is not yarn, as attention.temperature",
        ),
        (
            "LFM2",
            {"lfm2.attention.head_count_kv": [0, 2]},
            r"head_count_kv is \[0, 2\], expected 0 to 4 for each of 4 la",
        ),
        ("LFM2", {"lfm2.attention.head_count_kv": [0, 2, 1, 0]}, r"is \[0, 2, 1, 0\], supported in GGUF is one number"),
        ("LFM2", {"lfm2.attention.head_count_kv": [0] * 4}, r"is \[0, 0, 0, 0\], supported in GGUF is one number"),
        ("LFM2", {"lfm2.attention.head_count_kv": 2}, "head_count_kv is 2, expected an array"),
        ("Seed-OSS", {"seed_oss.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ("Seed-OSS", {"seed_oss.rope.dimension_count": 8}, "dimension_count is 8, heads have 16 dimensions"),
    ],
)
def test_metadata_that_are_not_supported_are_refused_by_name(
    name: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder, path = save(tmp_path / "folder", name), tmp_path / "model.gguf"
    metadata = family_metadata(folder, WRITTEN[name]) | change
    write_gguf(
        path,
        {key: value for key, value in metadata.items() if value is not None},
        family_tensors(folder, WRITTEN[name]),
    )
    with pytest.raises(CheckpointError, match=words):
        choose_implementation(path, "auto")


def test_without_transformers_they_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path = save(tmp_path / "folder", QUICK), tmp_path / "model.gguf"
    save_family_gguf(folder, path, WRITTEN[QUICK])
    monkeypatch.setattr("engine.model.implementation.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Cohere2ForCausalLM is computed by transformers, which is not installed"):
        choose_implementation(path, "auto")
