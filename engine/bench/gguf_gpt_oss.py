"""How llama.cpp's converter stores the experts of gpt-oss, and how `transformers` does.

The converter divides `gate_up_proj`, in which rows of two projections alternate, and keeps codes in MXFP4: 16 bytes of
a block hold number i in the low half of byte i and number 16 + i in the high one; in safetensors neighbours share a
byte.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_ONE = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


class Stack(NamedTuple):
    """A projection of all experts: numbers, or blocks [experts, rows, bytes] uint8 of codes in MXFP4."""

    tensor: torch.Tensor
    is_in_blocks: bool


def stacks_of(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Stack], set[str]]:
    """Returns llama.cpp's tensors of experts by their names, and the names of those they are made of."""
    stacks, used = {}, set()
    for name, tensor in tensors.items():
        found = _EXPERTS.fullmatch(name)
        if found is None:
            continue
        used.add(name)
        layer, projection, kind = found.groups()
        if kind == "_scales":
            continue
        if kind == "_blocks":
            tensor = _in_blocks(tensor, tensors[name.removesuffix("_blocks") + "_scales"])
        elif kind is None:
            tensor = tensor.transpose(1, 2)
        part = "bias" if kind == "_bias" else "weight"
        rows = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]} if projection == "gate_up_proj" else {"down": tensor}
        for one, of_one in rows.items():
            stacks[f"blk.{layer}.ffn_{one}_exps.{part}"] = Stack(of_one.contiguous(), kind == "_blocks")
    return stacks, used


def _in_blocks(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """[experts, rows, blocks, 16] and [experts, rows, blocks] -> [experts, rows, 17 * blocks]."""
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    return torch.cat((exponents[..., None], halves), dim=-1).flatten(-2)


def as_transformers_has_them(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a decoder with its experts, if they are one by one, in one tensor of a layer each."""
    joined: dict[str, torch.Tensor] = {}
    of_layers: dict[tuple[str, str], dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in weights.items():
        if (found := _ONE.fullmatch(name)) is None:
            joined[name] = tensor
            continue
        prefix, expert, projection, part = found.groups()
        of_layers.setdefault((prefix, part), {}).setdefault(projection, {})[int(expert)] = tensor
    for (prefix, part), projections in of_layers.items():
        gate, up, down = (
            torch.stack([projections[name][expert] for expert in sorted(projections[name])])
            for name in ("gate", "up", "down")
        )
        both = torch.stack((gate, up), dim=2).flatten(1, 2)  # rows alternate
        for name, tensor in (("gate_up_proj", both), ("down_proj", down)):
            if part == "bias":
                joined[f"{prefix}.{name}_bias"] = tensor
            else:
                joined[f"{prefix}.{name}"] = tensor.transpose(1, 2).contiguous()
    return joined
