"""Checkpoints as MLX writes them: embedding, output head and linear layers in integers, packed bit by bit."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from engine.model.int_weights import mlx_name

FILE = "model.safetensors"


def quantise_as_mlx(
    original: Path,
    quantised: Path,
    twin: Path,
    *,
    num_bits: int,
    group_size: int,
    but: tuple[str, ...] = (),
    own: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> None:
    """Quantises the matrices of a checkpoint.

    Args:
        original: a folder; the others are copies of it.
        quantised: gets the integers.
        twin: gets the values of the same integers, in fp32.
        num_bits, group_size: of integers, and inputs that share a scale.
        but: modules that stay as they are.
        own: parts of names of modules with other bits and groups.
    """
    stored, plain = {}, {}
    of_modules: dict[str, dict[str, int]] = {}
    for name, tensor in load_file(original / FILE).items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or module in but:
            stored[name] = plain[name] = tensor
            continue
        sizes = next((sizes for part, sizes in own.items() if part in module), (num_bits, group_size))
        if sizes != (num_bits, group_size):
            of_modules[mlx_name(module)] = dict(zip(("bits", "group_size"), sizes, strict=True))
        tensors, plain[name] = _quantised(tensor.double().numpy(), *sizes)
        stored |= {f"{module}.{suffix}": value for suffix, value in tensors.items()}
    save_file(_with_joint_experts(stored), quantised / FILE, {"format": "mlx"})
    save_file({name: tensor.float() for name, tensor in plain.items()}, twin / FILE)
    config = json.loads((original / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    settings: dict[str, Any] = {"group_size": group_size, "bits": num_bits, "mode": "affine"}
    settings |= dict.fromkeys(but, False) | of_modules
    (quantised / "config.json").write_text(
        json.dumps(config | {"quantization": settings, "quantization_config": settings})
    )


def _with_joint_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors with one for each projection of all experts of a layer."""
    joint: dict[str, list[torch.Tensor]] = {}
    others = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        module, _, suffix = name.rpartition(".")
        if mlx_name(module) != module:
            joint.setdefault(f"{mlx_name(module)}.{suffix}", []).append(tensor)
        else:
            others[name] = tensor
    return others | {name: torch.stack(experts) for name, experts in joint.items()}


def _quantised(
    weight: npt.NDArray[np.float64], num_bits: int, group_size: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns the tensors of a matrix, and the values of the integers."""
    num_out, num_in = weight.shape
    groups = weight.reshape(num_out, -1, group_size)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scales = torch.from_numpy((high - low) / (2**num_bits - 1)).to(torch.bfloat16)
    offsets = torch.from_numpy(low).to(torch.bfloat16)
    factors, lowest = (numbers.double().numpy()[:, :, None] for numbers in (scales, offsets))
    values = np.clip(np.round((groups - lowest) / factors), 0, 2**num_bits - 1).astype(np.int64)
    exact = (values * factors + lowest).reshape(num_out, num_in).astype(np.float32)
    words = torch.from_numpy(_words(values.reshape(num_out, num_in), num_bits))
    return {"weight": words, "scales": scales, "biases": offsets}, torch.from_numpy(exact)


def _words(values: npt.NDArray[np.int64], num_bits: int) -> npt.NDArray[np.uint32]:
    """Packs [rows, n] along rows: the integer i of a row has its bits from i * num_bits on."""
    words = np.zeros((values.shape[0], values.shape[1] * num_bits // 32), dtype=np.uint32)
    for column in range(values.shape[1]):
        for bit in range(num_bits):
            place = column * num_bits + bit
            words[:, place // 32] |= ((values[:, column] >> bit & 1) << place % 32).astype(np.uint32)
    return words
