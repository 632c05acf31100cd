"""Random LoRA adapters in PEFT's format, and checkpoints with an adapter merged by plain arithmetic."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
WEIGHTS = "model.safetensors"
"""File of a checkpoint."""


def save_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 1,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    dtype: torch.dtype = torch.float32,
    layers: Mapping[str, tuple[int, int]] | None = None,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    **fields: Any,
) -> Path:
    """Saves an adapter of a checkpoint that changes its linear layers by half as much as they are; returns its folder.

    Args:
        folder: to be made.
        base: the checkpoint, with one file of weights.
        rank, alpha, seed, targets, dtype: of the adapter.
        layers: linear layers that it changes, and their rows and columns; None: all whose names end with a target.
        tensors: replace those of the file; None removes one.
        fields: replace those of the config.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    saved: dict[str, torch.Tensor] = {}
    if layers is None:
        modules = {name.removesuffix(".weight"): weight for name, weight in load_file(base / WEIGHTS).items()}
        layers = {
            name: (weight.shape[0], weight.shape[1])
            for name, weight in modules.items()
            if name.endswith(tuple(f".{target}" for target in targets))
        }
    else:
        targets = list(layers)
    for module, (rows, columns) in sorted(layers.items()):
        a = torch.randn(rank, columns, generator=generator) * columns**-0.5
        b = torch.randn(rows, rank, generator=generator) * rank**-0.5 * rank / alpha / 2
        saved[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype)
        saved[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype)
    saved |= {name: tensor for name, tensor in (tensors or {}).items() if tensor is not None}
    for name in [name for name, tensor in (tensors or {}).items() if tensor is None]:
        del saved[name]
    save_file(saved, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "layers_to_transform": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config | fields))
    return folder


def save_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Saves the checkpoint whose weights are W + scale * B A, in fp32; returns its folder."""
    shutil.copytree(base, folder)
    weights = load_file(base / WEIGHTS)
    for module, change in merged_changes(adapter).items():
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + change).float()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def merged_changes(adapter: Path) -> dict[str, torch.Tensor]:
    """Returns scale * B A of each linear layer that an adapter changes, in fp64."""
    config = json.loads((adapter / CONFIG_FILE).read_text())
    divisor = config["r"] ** 0.5 if config["use_rslora"] else config["r"]
    scale = config["lora_alpha"] / divisor
    matrices = load_file(adapter / WEIGHTS_FILE)
    changes = {}
    for name in [name for name in matrices if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = matrices[name].double(), matrices[name.replace("lora_A", "lora_B")].double()
        changes[module] = scale * (b @ a)
    return changes
