"""Gated delta rules as llama.cpp's converter stores them, and names and metadata of models that have them.

`transformers` has the value heads of a key head side by side; files of Qwen3.5 have the first of all key heads, then
the second ones. Files of Qwen3-Next keep that order, but have in two matrices what `transformers` has in one.
"""

from collections.abc import Mapping
from typing import Any

import torch

ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")

NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.out_proj": "ssm_out",
}
"""Names of modules of a layer in files, by those of `transformers`."""

_MODULE = "linear_attn."
_FUSED, _QKV, _Z = (f"{_MODULE}in_proj_{name}.weight" for name in ("qkvz", "qkv", "z"))


def metadata_of(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a model's gated delta rules; name: one of `ARCHITECTURES`."""
    values = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }
    return values if name == "qwen3next" else values | {"rope.dimension_sections": [4, 2, 2, 0]}


def as_llama_cpp_has_them(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns tensors of `transformers` as they are in a file, by the names that `transformers` would give them."""
    order = _order(config)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith("norm.weight") and _MODULE not in name:
            tensor = tensor.float() + 1
        if name.endswith(_FUSED):
            prefix = name.removesuffix(_FUSED)
            of_heads = tensor.view(config["linear_num_key_heads"], -1, tensor.shape[1])
            *qkv, z = (rows.flatten(0, 1) for rows in torch.split(of_heads, _head_rows(config), dim=1))
            stored |= {f"{prefix}{_QKV}": torch.cat(qkv), f"{prefix}{_Z}": z}
            continue
        if name.endswith(".A_log"):
            tensor = -tensor.float().exp()
        if name.endswith(".conv1d.weight"):
            tensor = tensor.squeeze(1)
        stored[name] = _ordered(name, tensor, order, config)
    return stored


def as_transformers_has_them(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns tensors that were read from a file, by the names of `transformers`, with value heads in its order."""
    order = _order(config).argsort()
    found = {name: _ordered(name, tensor, order, config) for name, tensor in weights.items()}
    if config["architectures"] != ["Qwen3NextForCausalLM"]:
        return found
    key_heads, rows = config["linear_num_key_heads"], _head_rows(config)[:3]
    for prefix in [name.removesuffix(_QKV) for name in found if name.endswith(_QKV)]:
        qkv, z = found.pop(f"{prefix}{_QKV}"), found.pop(f"{prefix}{_Z}")
        parts = *torch.split(qkv, [key_heads * number for number in rows]), z
        heads = [part.view(key_heads, -1, part.shape[1]) for part in parts]
        found[f"{prefix}{_FUSED}"] = torch.cat(heads, dim=1).flatten(0, 1)
    return found


def _head_rows(config: Mapping[str, Any]) -> list[int]:
    """Returns the rows of query, key, values and gates of a key head in a fused projection."""
    key_dim, shared = config["linear_key_head_dim"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    return [key_dim, key_dim, *[shared * config["linear_value_head_dim"]] * 2]


def _order(config: Mapping[str, Any]) -> torch.Tensor:
    """Returns the value heads of `transformers` in the order of a file, [num_value_heads] int64."""
    heads = torch.arange(config["linear_num_value_heads"])
    if config["architectures"] == ["Qwen3NextForCausalLM"]:
        return heads
    return heads.view(config["linear_num_key_heads"], -1).T.flatten()


def _ordered(name: str, tensor: torch.Tensor, order: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Returns a tensor of a delta rule with its value heads in an order; others are unchanged."""
    if _MODULE not in name:
        return tensor
    dim, key_size = config["linear_value_head_dim"], config["linear_num_key_heads"] * config["linear_key_head_dim"]
    rows = (order[:, None] * dim + torch.arange(dim)).flatten()
    match name.split(_MODULE)[1]:
        case "A_log" | "dt_bias" | "in_proj_b.weight" | "in_proj_a.weight":
            return tensor[order]
        case "in_proj_z.weight":
            return tensor[rows]
        case "out_proj.weight":
            return tensor[:, rows]
        case "in_proj_qkv.weight" | "conv1d.weight":
            return torch.cat((tensor[: 2 * key_size], tensor[2 * key_size :][rows]))
    return tensor
