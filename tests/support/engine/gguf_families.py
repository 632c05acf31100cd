"""GGUF files of architectures that transformers computes, as llama.cpp's converter writes them.

Names of tensors are those of the package gguf, so that the engine's have an independent truth.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from engine.bench.gguf_writer import Tensor, plain, tokenizer_metadata, write_gguf
from tests.support.engine import gguf_conversions as conversions


@dataclass(frozen=True, slots=True)
class Written:
    """How the converter writes a family.

    Attributes:
        name: general.architecture.
        keys: fields of config.json -> keys of metadata, besides those of all families.
        fields: of the configuration, beside those of `FAMILIES`, so that the file can say all that it says.
        rotates_pairs: whether rows of queries and keys are in another order.
        constants: values of other keys.
        values: returns keys of metadata that take more than a field; None: the key is not written.
        convert: returns the tensors of a checkpoint as the converter names them before it maps names to its own.
    """

    name: str
    keys: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    rotates_pairs: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    values: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda _: {}
    convert: Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, torch.Tensor]] = lambda tensors, _: tensors


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

_LATENT = {
    **_RMS_NORM,
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
_GRANITE = {
    **_RMS_NORM,
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
_GRANITE_SHARED = {**_GRANITE, "shared_intermediate_size": "expert_shared_feed_forward_length"}
_MULTIPLIERS = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_DEEPSEEK_EXPERTS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
}
_NORMALIZED = {"norm_topk_prob": "expert_weights_norm"}
_DEEPSEEK = {
    **_LATENT,
    **_DEEPSEEK_EXPERTS,
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_DEEPSEEK_V3 = {**_DEEPSEEK, **_NORMALIZED}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

WRITTEN = {
    "Arcee": Written("arcee", _RMS_NORM, rotates_pairs=True),
    "Command R": Written("command-r", _COHERE),
    "Command R7B": Written("cohere2", {**_COHERE, **_WINDOW}, _FOUR_LAYERS),
    "DeepSeek-V2": Written(
        "deepseek2",
        _DEEPSEEK,
        {
            "n_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "rope_parameters": _DEEPSEEK_YARN,
        },
        constants={"expert_gating_func": 1},
        values=conversions.latent_values,
        convert=conversions.split_expansions,
    ),
    "DeepSeek-V3": Written(
        "deepseek2",
        _DEEPSEEK_V3,
        {"n_group": 2, "routed_scaling_factor": 2.5},
        constants={"expert_gating_func": 2},
        values=conversions.latent_values,
        convert=conversions.split_expansions,
    ),
    "GLM-4.7 Flash": Written(
        "deepseek2",
        _DEEPSEEK_V3,
        constants={"expert_gating_func": 2},
        values=conversions.latent_values,
        convert=conversions.split_expansions,
    ),
    "Youtu-LLM": Written("deepseek2", _LATENT, values=conversions.latent_values, convert=conversions.split_expansions),
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
    "Falcon-H1": Written(
        "falcon-h1",
        {
            **_RMS_NORM,
            "mamba_d_ssm": "ssm.inner_size",
            "mamba_n_heads": "ssm.time_step_rank",
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
        },
        conversions.FALCON_MULTIPLIERS,
        convert=conversions.multiply_falcon,
    ),
    "Nemotron-H": Written(
        "nemotron_h_moe",
        {
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
            "mamba_num_heads": "ssm.time_step_rank",
            "n_groups": "ssm.group_count",
            "ssm_state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "moe_latent_size": "moe_latent_size",
        },
        {
            "n_groups": 2,
            "n_routed_experts": 4,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 96,
            "moe_latent_size": 32,
            "routed_scaling_factor": 1.5,
        },
        values=conversions.nemotron_h_values,
        convert=conversions.rename_nemotron_h,
    ),
    "Gemma 3n": Written(
        "gemma3n",
        {
            **_RMS_NORM,
            **_WINDOW,
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "altup_active_idx": "altup.active_idx",
            "altup_num_inputs": "altup.num_inputs",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        {"final_logit_softcapping": 2.0},
        values=conversions.gemma3n_values,
        convert=conversions.stack_gemma3n,
    ),
    "Gemma 4": Written(
        "gemma4",
        {
            **_RMS_NORM,
            **_WINDOW,
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        {"use_double_wide_mlp": True, "final_logit_softcapping": 2.0},
        values=conversions.gemma4_values,
        convert=conversions.rename_gemma4,
    ),
    "GLM-4.5": Written(
        "glm4moe",
        {**_RMS_NORM, **_DEEPSEEK_EXPERTS, **_NORMALIZED},
        {"use_qk_norm": True, "routed_scaling_factor": 1.5},
        constants={"expert_gating_func": 2},
    ),
    "Granite 4": Written(
        "granitehybrid",
        {
            **_GRANITE_SHARED,
            "mamba_n_heads": "ssm.time_step_rank",
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
        },
        {**_MULTIPLIERS, "mamba_n_groups": 2},
        rotates_pairs=True,
        values=conversions.granite_values,
        convert=conversions.split_granite,
    ),
    "Granite MoE": Written("granitemoe", _GRANITE, _MULTIPLIERS, rotates_pairs=True, convert=conversions.split_granite),
    "Granite MoE with a shared expert": Written(
        "granitemoe", _GRANITE_SHARED, _MULTIPLIERS, rotates_pairs=True, convert=conversions.split_granite
    ),
    "dots.llm1": Written(
        "dots1",
        {**_RMS_NORM, **_DEEPSEEK_EXPERTS, **_NORMALIZED},
        {"routed_scaling_factor": 1.5},
        constants={"expert_gating_func": 2},
    ),
    "MiniMax-M2": Written(
        "minimax-m2",
        {
            **_RMS_NORM,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
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
    "Nemotron": Written(
        "nemotron", {"norm_eps": "attention.layer_norm_epsilon"}, convert=conversions.with_one_added_to_norms
    ),
    "OLMo": Written(
        "olmo", {"clip_qkv": "attention.clamp_kqv"}, {"clip_qkv": 1.0}, True, {"attention.layer_norm_epsilon": 1e-5}
    ),
    "Phi": Written("phi2", {"layer_norm_eps": "attention.layer_norm_epsilon"}),
    "StableLM": Written(
        "stablelm",
        {"layer_norm_eps": "attention.layer_norm_epsilon"},
        {"use_qkv_bias": True},
        convert=conversions.with_stacked_norms,
    ),
    "StarCoder2": Written("starcoder2", {"norm_epsilon": "attention.layer_norm_epsilon"}, {"sliding_window": 4096}),
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
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    rope = rope.get("full_attention", rope)
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
        }
    if "llama_4_scaling_beta" in rope:
        values["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if written.name == "ernie4_5-moe":
        shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        values["expert_shared_feed_forward_length"] = shared
    if "conv" in (types := config.get("layer_types", ())):
        values["attention.head_count_kv"] = [0 if kind == "conv" else config["num_key_value_heads"] for kind in types]
    values |= written.values(config)
    return {
        "general.architecture": written.name,
        **{f"{written.name}.{key}": value for key, value in values.items() if value is not None},
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        **tokenizer_metadata(folder),
    }


def family_tensors(folder: Path, written: Written, kind: str = "F32") -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint as they are stored."""
    config = json.loads((folder / "config.json").read_text())
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == written.name)
    names = gguf.get_tensor_name_map(architecture, config.get("num_hidden_layers") or len(config["layers_block_type"]))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in written.convert(load_file(folder / "model.safetensors"), config).items():
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
        tensor = tensor.squeeze(1) if "conv" in name and tensor.ndim == 3 else tensor  # which have one channel
        tensors[stored] = plain(tensor, kind if is_matrix else "F32")
    for name, matrices in stacks.items():
        tensors[name] = plain(torch.stack([matrices[number] for number in range(len(matrices))]), kind)
    return tensors


def _stored_name(names: gguf.TensorNameMap, name: str) -> str | None:
    if name.startswith(("blk.", "rope_")):
        return name
    return names.get_name(name, try_suffixes=(".weight", ".bias"))
