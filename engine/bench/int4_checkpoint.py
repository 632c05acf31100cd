"""Rounds the linear layers of a checkpoint to integers of 4 bits, as simply as possible: the worst case of them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP_SIZE = 32
_FILE = "model.safetensors"
_LARGEST = 7
_PER_WORD = 8
_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE,
            },
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip


def write_int4_checkpoint(source: Path, target: Path) -> None:
    """Writes a checkpoint in the format of compressed-tensors, rounded to nearest in groups of 32 inputs.

    Args:
        source: a checkpoint of one file, in 16 or 32 bits.
        target: the folder, which does not exist yet.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": _CONFIG}))
    tensors = {}
    for name, tensor in load_file(source / _FILE).items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"] = _rounded(tensor.float())
            tensors[f"{module}.weight_shape"] = torch.tensor(tensor.shape)
        else:
            tensors[name] = tensor
    save_file(tensors, target / _FILE)


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> words [out, in / 8] int32, the first integer plus 8 in the lowest bits, and scales [out, groups]."""
    num_out = len(weight)
    groups = weight.view(num_out, -1, GROUP_SIZE)
    scales = groups.abs().amax(dim=2) / _LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    integers = (groups / scales[..., None]).round().to(torch.int32).view(num_out, -1, _PER_WORD) + 8
    words = torch.zeros(integers.shape[:2], dtype=torch.int32)
    for place in range(_PER_WORD):
        words |= integers[..., place] << 4 * place
    return words, scales
