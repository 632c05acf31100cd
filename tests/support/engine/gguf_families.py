"""GGUF files of architectures that transformers computes, as llama.cpp's converter writes them.

Names of tensors are those of the package gguf, so that the engine's have an independent truth.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from engine.bench.gguf_writer import Tensor, plain, tokenizer_metadata, write_gguf


@dataclass(frozen=True, slots=True)
class Written:
    """How the converter writes a family.

    Attributes:
        name: general.architecture.
        keys: fields of config.json -> keys of metadata, besides those of all families.
        fields: of the configuration, beside those of `FAMILIES`, so that the file can say all that it says.
        rotates_pairs: whether rows of queries and keys are in another order.
        constants: values of other keys.
    """

    name: str
    keys: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    rotates_pairs: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)


_RMS_NORM = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_COHERE = {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_LFM2 = {"norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache"}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}

WRITTEN = {
    "Arcee": Written("arcee", _RMS_NORM, rotates_pairs=True),
    "Command R": Written("command-r", _COHERE),
    "Command R7B": Written("cohere2", {**_COHERE, **_WINDOW}, _FOUR_LAYERS),
    "ERNIE 4.5": Written("ernie4_5", _RMS_NORM),
    "ERNIE 4.5 MoE": Written(
        "ernie4_5-moe",
        {
            **_RMS_NORM,
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
    "EXAONE 4": Written("exaone4", {**_RMS_NORM, **_WINDOW}, _FOUR_LAYERS),
    "GLM-4.5": Written(
        "glm4moe",
        {
            **_RMS_NORM,
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
        },
        {"use_qk_norm": True, "routed_scaling_factor": 1.5},
        constants={"expert_gating_func": 2},
    ),
    "Hunyuan": Written("hunyuan-dense", _RMS_NORM),
    "LFM2": Written("lfm2", _LFM2, {"block_auto_adjust_ff_dim": False}),
    "LFM2-MoE": Written(
        "lfm2moe",
        {**_LFM2, **_EXPERTS, "num_dense_layers": "leading_dense_block_count"},
        constants={"expert_gating_func": 2},
    ),
    "Ministral 3": Written("mistral3", _RMS_NORM, rotates_pairs=True),
    "OLMoE": Written("olmoe", {**_RMS_NORM, "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}),
    "Seed-OSS": Written("seed_oss", _RMS_NORM),
}


def save_family_gguf(folder: Path, path: Path, written: Written, kind: str = "F32") -> None:
    """Writes a checkpoint as a GGUF file with matrices in F32, F16 or BF16; vectors are in F32.

    folder: has one file of weights, and a tokenizer of words.
    """
    write_gguf(path, family_metadata(folder, written), family_tensors(folder, written, kind))


def family_metadata(folder: Path, written: Written) -> dict[str, Any]:
    """Returns the metadata of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        **{key: config[field] for field, key in written.keys.items() if config[field] is not None},
        **written.constants,
    }
    if rope["rope_type"] == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    if written.name == "ernie4_5-moe":
        shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        values["expert_shared_feed_forward_length"] = shared
    if "conv" in (types := config.get("layer_types", ())):
        values["attention.head_count_kv"] = [0 if kind == "conv" else config["num_key_value_heads"] for kind in types]
    return {
        "general.architecture": written.name,
        **{f"{written.name}.{key}": value for key, value in values.items()},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        **tokenizer_metadata(folder),
    }


def family_tensors(folder: Path, written: Written, kind: str = "F32") -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint as they are stored."""
    config = json.loads((folder / "config.json").read_text())
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == written.name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if found := re.fullmatch(r"model\.(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            joint = f"{found[1]}.{found[3]}.weight"
            stored = _stored_name(names, f"model.{joint}") or _stored_name(names, joint)
            assert stored is not None, name
            stacks.setdefault(stored, {})[int(found[2])] = tensor
            continue
        num_heads = heads.get(name.split(".")[-2])
        if written.rotates_pairs and num_heads is not None:
            tensor = tensor.view(num_heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        stored = _stored_name(names, re.sub("(expert_bias|correction)(_bias)?$", r"\1.bias", name))
        assert stored is not None, name
        is_matrix = tensor.ndim == 2 and "ffn_gate_inp" not in stored
        tensor = tensor.squeeze(1) if tensor.ndim == 3 else tensor  # convolutions have one channel
        tensors[stored] = plain(tensor, kind if is_matrix else "F32")
    for name, matrices in stacks.items():
        tensors[name] = plain(torch.stack([matrices[number] for number in range(len(matrices))]), kind)
    return tensors


def _stored_name(names: gguf.TensorNameMap, name: str) -> str | None:
    return names.get_name(name, try_suffixes=(".weight", ".bias"))
