"""Gated delta rules as llama.cpp's converter stores them: value heads in another order, and decays.

`transformers` has the value heads of a key head side by side; llama.cpp has the first of all key heads, then the second
ones.
"""

from collections.abc import Mapping
from typing import Any

import torch

_MODULE = "linear_attn."


def as_llama_cpp_has_it(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Returns a tensor of `transformers`, whose name is given, as it is in a file; others are unchanged."""
    if _MODULE not in name:
        return tensor
    part = name.split(_MODULE)[1]
    if part == "A_log":
        tensor = -tensor.float().exp()
    if part == "conv1d.weight":
        tensor = tensor.squeeze(1)
    return _ordered(part, tensor, _order(config), config)


def as_transformers_has_them(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns tensors that were read from a file, by the names of `transformers`, with value heads in its order."""
    order = _order(config).argsort()
    return {
        name: _ordered(name.split(_MODULE)[1], tensor, order, config) if _MODULE in name else tensor
        for name, tensor in weights.items()
    }


def _order(config: Mapping[str, Any]) -> torch.Tensor:
    """Returns the value heads of `transformers` in the order of a file, [num_value_heads] int64."""
    return torch.arange(config["linear_num_value_heads"]).view(config["linear_num_key_heads"], -1).T.flatten()


def _ordered(part: str, tensor: torch.Tensor, order: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Returns a tensor of the module with its value heads in an order."""
    dim, key_size = config["linear_value_head_dim"], config["linear_num_key_heads"] * config["linear_key_head_dim"]
    rows = (order[:, None] * dim + torch.arange(dim)).flatten()
    match part:
        case "A_log" | "dt_bias" | "in_proj_b.weight" | "in_proj_a.weight":
            return tensor[order]
        case "in_proj_z.weight":
            return tensor[rows]
        case "out_proj.weight":
            return tensor[:, rows]
        case "in_proj_qkv.weight" | "conv1d.weight":
            return torch.cat((tensor[: 2 * key_size], tensor[2 * key_size :][rows]))
    return tensor
