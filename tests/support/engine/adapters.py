"""Random LoRA adapters in PEFT's format, and checkpoints with an adapter merged by plain arithmetic."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 1,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    **fields: Any,
) -> Path:
    """Saves an adapter of a checkpoint that changes its linear layers by half as much as they are; returns its folder.

    Args:
        folder: to be made.
        base: the checkpoint, with one file of weights.
        rank, alpha, seed, targets, dtype: of the adapter.
        tensors: replace those of the file; None removes one.
        fields: replace those of the config.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    saved: dict[str, torch.Tensor] = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            rows, columns = weight.shape
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
    config = json.loads((adapter / CONFIG_FILE).read_text())
    divisor = config["r"] ** 0.5 if config["use_rslora"] else config["r"]
    scale = config["lora_alpha"] / divisor
    change, weights = load_file(adapter / WEIGHTS_FILE), load_file(base / "model.safetensors")
    for name in [name for name in change if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = change[name].double(), change[name.replace("lora_A", "lora_B")].double()
        weight = weights[f"{module}.weight"].double() + scale * (b @ a)
        weights[f"{module}.weight"] = weight.float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
