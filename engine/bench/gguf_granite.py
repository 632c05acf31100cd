"""Experts of Granite, which transformers has in two tensors of a layer."""

import re
from collections.abc import Mapping

import torch

_EXPERT = re.compile(r"(.*\.block_sparse_moe)\.experts\.0\.down_proj\.weight")


def as_transformers_has_them(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a decoder with gate and up of all experts of a layer in one, and down in another."""
    joint = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors:
        if (found := _EXPERT.fullmatch(name)) is None:
            continue
        experts = f"{found[1]}.experts"
        count = sum(other.startswith(f"{experts}.") and other.endswith(".down_proj.weight") for other in tensors)
        gate, up, down = (
            torch.stack([tensors[f"{experts}.{expert}.{part}.weight"] for expert in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        joint[f"{found[1]}.input_linear.weight"] = torch.cat((gate, up), dim=1)
        joint[f"{found[1]}.output_linear.weight"] = down
    return joint
