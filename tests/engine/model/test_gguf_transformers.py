"""GGUF files of architectures that transformers computes are the models of the folders that they were made of."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.bench.shapes import write_tokenizer
from engine.bench.gguf_writer import plain, save_twin, write_gguf
from engine.core.request import SamplingParams
from engine.errors import CheckpointError, ConfigError
from engine.model.gguf_checkpoint import GgufCheckpoint
from engine.model.gguf_joint import halves_of
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
SIZES_IN_BLOCKS: dict[str, dict[str, int]] = {
    "DeepSeek-V2": {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "Granite 4": {"intermediate_size": 64},
}
SIZE_OF_OTHERS = {"DeepSeek-V2": 3 * 4 * 64 * 32}
"""Numbers of parameters beside the embedding that are not in blocks: expansions of latents."""
NOT_IN_BLOCKS = ("conv.conv", "conv1d", "ffn_gate_inp", "ssm_a", "ssm_d", "ssm_norm")


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


@pytest.mark.slow
def test_norms_of_heads_are_read_from_one_tensor(tmp_path: Path) -> None:
    """As in StableLM 2 12B, whose layers have no second norm."""
    folder = save(tmp_path / "folder", "StableLM", qk_layernorm=True, use_parallel_residual=True)
    save_family_gguf(folder, tmp_path / "model.gguf", WRITTEN["StableLM"])
    assert answers(tmp_path / "model.gguf") == answers(folder)


@pytest.mark.slow
def test_one_expansion_for_keys_and_values_is_read_too(tmp_path: Path) -> None:
    """As in older files of DeepSeek-V2 and V3."""
    folder, written = save(tmp_path / "folder", "DeepSeek-V3"), WRITTEN["DeepSeek-V3"]
    config = json.loads((folder / "config.json").read_text())
    old = {
        "attention.head_count_kv": config["num_attention_heads"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": config["v_head_dim"],
        "rope.dimension_count": config["qk_rope_head_dim"],
    }
    save_family_gguf(
        folder, tmp_path / "model.gguf", replace(written, values=lambda _: old, convert=lambda tensors, _: tensors)
    )
    assert answers(tmp_path / "model.gguf") == answers(folder)


@pytest.mark.parametrize(
    "name",
    [
        "Seed-OSS",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("Arcee", "DeepSeek-V2", "GLM-4.5", "Granite 4", "LFM2", "LFM2-MoE", "Phi")
        ),
    ],
)
def test_linear_layers_and_experts_stay_in_blocks(name: str, tmp_path: Path) -> None:
    """Arcee's queries and keys have rows in another order; experts have other names in LFM2-MoE.

    Granite's gate and up, which are one layer, are in blocks of different types.
    """
    sizes = {"moe_intermediate_size": 64, "shared_intermediate_size": 64, **SIZES_IN_BLOCKS.get(name, {})}
    folder, path = save(tmp_path / "folder", name, **sizes), tmp_path / "model.gguf"
    tensors, generator = family_tensors(folder, WRITTEN[name]), torch.Generator().manual_seed(0)
    for key, tensor in tensors.items():
        if len(tensor.shape) > 1 and not any(part in key for part in NOT_IN_BLOCKS):
            kind = "Q4_0" if any(part in key for part in ("attn_v", "exps", "up_shexp")) else "Q8_0"
            blocks = random_blocks(kind, math.prod(tensor.shape[:-1]), tensor.shape[-1], generator)
            tensors[key] = blocks._replace(shape=tensor.shape)
    write_gguf(path, family_metadata(folder, WRITTEN[name]), tensors)
    config = TransformersConfig.from_dir(path)
    assert isinstance(config.quantized, GgufWeights)
    kinds = config.quantized.kinds
    assert all(layer in kinds or halves_of(layer, kinds) for layer in config.linear_layers)
    assert config.tied_head is not None or "lm_head" in config.linear_layers
    assert all(any(kept.startswith(f"{module}.3.") for kept in config.quantized.kinds) for module in config.experts)
    dtypes = {"dtype": torch.float32, "model_dtype": torch.float32}
    stays = config.packed_bytes(**dtypes, is_quantized=False, kept=(GgufWeights,), is_compact=True)
    others = 4 * (307 * 64 + SIZE_OF_OTHERS.get(name, 0))  # the embedding and more, which is not in blocks
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
            r"head_count_kv is \[0, 2\], expected an integer >= 0 for each of",
        ),
        ("LFM2", {"lfm2.attention.head_count_kv": [0, 2, 1, 0]}, r"is \[0, 2, 1, 0\], supported in GGUF is one number"),
        ("LFM2", {"lfm2.attention.head_count_kv": [0] * 4}, r"is \[0, 0, 0, 0\], supported in GGUF is one number"),
        ("LFM2", {"lfm2.attention.head_count_kv": 2}, "head_count_kv is 2, expected an array"),
        ("Seed-OSS", {"seed_oss.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        (
            "DeepSeek-V2",
            {"deepseek2.expert_weights_norm": True},
            "weights_norm is True, supported in GGUF is False",
        ),
        ("DeepSeek-V3", {"deepseek2.expert_gating_func": 3}, "expert_gating_func is 3, supported in GGUF are 1 and 2"),
        ("DeepSeek-V3", {"deepseek2.attention.temperature_scale": 0.1}, "temperature_scale is 0.1, supported in GGUF"),
        ("DeepSeek-V3", {"deepseek2.attention.key_length_mla": 8}, "key_length_mla is 8, expected more than the 8 tha"),
        ("Gemma 4", {"gemma4.attention.value_length_swa": 8}, "value_length_swa is 8, supported in GGUF is 16"),
        ("Gemma 4", {"gemma4.feed_forward_length": [96, 48] * 3}, r"\[96, 48, 96, 48, 96, 48\], expected 96 in 4 lay"),
        ("Gemma 4", {"gemma4.attention.head_count_kv": [2, 1, 1] * 2}, r"supported in GGUF is one number for each of"),
        ("Granite 4", {"granitehybrid.ssm.inner_size": 72}, "inner_size is 72, expected a multiple of embedding_len"),
        ("Granite 4", {"granitehybrid.ssm.time_step_rank": 7}, "is 128, not a multiple of the 7 heads of ssm.time_s"),
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


def test_first_files_of_glm_flash_choose_experts_by_sigmoids(tmp_path: Path) -> None:
    """They do not say so; their number of tokens tells them, as in llama.cpp."""
    folder, path = save(tmp_path / "folder", "GLM-4.7 Flash"), tmp_path / "model.gguf"
    metadata = family_metadata(folder, WRITTEN["GLM-4.7 Flash"])
    del metadata["deepseek2.expert_gating_func"], metadata["deepseek2.expert_weights_norm"]
    tensors = family_tensors(folder, WRITTEN["GLM-4.7 Flash"])
    for vocab_size, architecture in ((307, "DeepseekV2ForCausalLM"), (154880, "DeepseekV3ForCausalLM")):
        write_gguf(path, {**metadata, "deepseek2.vocab_size": vocab_size}, tensors)
        assert GgufCheckpoint(path).config().raw("architectures") == [architecture]


def test_expansions_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    folder, path = save(tmp_path / "folder", "DeepSeek-V3"), tmp_path / "model.gguf"
    tensors = family_tensors(folder, WRITTEN["DeepSeek-V3"]) | {
        "blk.1.attn_v_b.weight": plain(torch.ones(2, 16, 16), "F32")
    }
    write_gguf(path, family_metadata(folder, WRITTEN["DeepSeek-V3"]), tensors)
    with pytest.raises(CheckpointError, match=r"attn_k_b has shape \[4, 16, 16\] and attn_v_b \[2, 16, 16\], expected"):
        answers(path)


@pytest.mark.slow
def test_granite_without_experts_has_one_feed_forward_network(tmp_path: Path) -> None:
    """As Granite 4.0 H Micro; its layers do not rotate, or do."""
    sizes = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
    for rotation in (None, "rope"):
        folder = save(tmp_path / f"folder-{rotation}", "Granite 4", position_embedding_type=rotation, **sizes)
        save_family_gguf(folder, tmp_path / "model.gguf", WRITTEN["Granite 4"])
        assert answers(tmp_path / "model.gguf") == answers(folder)


@pytest.mark.slow
def test_gemma_4_with_experts_has_keys_for_values_in_layers_without_a_window(tmp_path: Path) -> None:
    """As Gemma 4 26B A4B, whose files have gate and up of an expert in one matrix."""
    fields = {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    folder = save(tmp_path / "folder", "Gemma 4", **fields)
    save_family_gguf(folder, tmp_path / "model.gguf", WRITTEN["Gemma 4"])
    assert answers(tmp_path / "model.gguf") == answers(folder)


@pytest.mark.slow
def test_experts_that_transformers_computes_may_be_in_blocks(tmp_path: Path) -> None:
    """Those of Nemotron-H have no gate; another layer has a feed-forward network without experts as `nemotron_h`."""
    folder, path = save(tmp_path / "folder", "Nemotron-H", moe_latent_size=None), tmp_path / "model.gguf"
    tensors, generator = family_tensors(folder, WRITTEN["Nemotron-H"]), torch.Generator().manual_seed(0)
    for key in [key for key in tensors if "ffn_up" in key]:
        shape = tensors[key].shape
        tensors[key] = random_blocks("Q8_0", math.prod(shape[:-1]), shape[-1], generator)._replace(shape=shape)
    write_gguf(path, family_metadata(folder, WRITTEN["Nemotron-H"]), tensors)
    save_twin(path, folder, tmp_path / "twin")
    assert answers(path) == answers(tmp_path / "twin")
    dense = save(tmp_path / "dense", "Nemotron-H", layers_block_type=["mlp", "linear_attention", "full_attention"])
    save_family_gguf(dense, path, replace(WRITTEN["Nemotron-H"], name="nemotron_h"))
    assert answers(path) == answers(dense)


def test_without_transformers_they_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path = save(tmp_path / "folder", QUICK), tmp_path / "model.gguf"
    save_family_gguf(folder, path, WRITTEN[QUICK])
    monkeypatch.setattr("engine.model.implementation.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Cohere2ForCausalLM is computed by transformers, which is not installed"):
        choose_implementation(path, "auto")
