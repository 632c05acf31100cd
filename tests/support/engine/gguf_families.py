"""GGUF files of architectures that transformers computes, as llama.cpp's converter writes them.

Names of tensors are those of the package gguf, so that the engine's have an independent truth.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
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
    """

    name: str
    keys: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    rotates_pairs: bool = False


_RMS_NORM = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_COHERE = {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_LFM2 = {"norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache"}
_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}

WRITTEN = {
    "Arcee": Written("arcee", _RMS_NORM, rotates_pairs=True),
    "Command R": Written("command-r", _COHERE),
    "Command R7B": Written("cohere2", {**_COHERE, **_WINDOW}, _FOUR_LAYERS),
    "ERNIE 4.5": Written("ernie4_5", _RMS_NORM),
    "EXAONE 4": Written("exaone4", {**_RMS_NORM, **_WINDOW}, _FOUR_LAYERS),
    "Hunyuan": Written("hunyuan-dense", _RMS_NORM),
    "LFM2": Written("lfm2", _LFM2, {"block_auto_adjust_ff_dim": False}),
    "Ministral 3": Written("mistral3", _RMS_NORM, rotates_pairs=True),
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
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        num_heads = heads.get(name.split(".")[-2])
        if written.rotates_pairs and num_heads is not None:
            tensor = tensor.view(num_heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        is_matrix = tensor.ndim == 2
        tensors[stored] = plain(
            tensor.squeeze(1) if tensor.ndim == 3 else tensor, kind if is_matrix else "F32"
        )  # convolutions have one channel
    return tensors
