"""Checkpoints in 4 and 8-bit floats, packed independently of the engine with numpy, and their values in fp32.

The numbers are those of the formats' definitions: E2M1 and MXFP4 of OCP Microscaling Formats 1.0, E4M3 of
arXiv:2209.05433, NVFP4 of arXiv:2509.25149; names and shapes of tensors are those that ModelOpt and llm-compressor
write.
"""

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"

FloatLayout = Literal["modelopt fp8", "modelopt", "nvfp4", "mxfp4"]
Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
E4M3 = np.array(
    [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127], np.float32
)
"""Values of the codes from 0 to 126; those from 128 on are these with a minus, and 127 is NaN."""


def _of_modelopt(algorithm: str, num_bits: int, **group_size: int) -> dict[str, Any]:
    numbers = {"dynamic": False, "num_bits": num_bits, "type": "float", **group_size}
    return {
        "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "quant_algo": algorithm,
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.33.0"},
        "quant_method": "modelopt",
    }


def _of_llm_compressor(stored: str, strategy: str, group_size: int) -> dict[str, Any]:
    numbers = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group_size, "symmetric": True}
    inputs = {**numbers, "dynamic": "local"} if stored.startswith("nvfp4") else None
    group = {"targets": ["Linear"], "weights": numbers, "input_activations": inputs, "format": stored}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


CONFIGS: dict[FloatLayout, dict[str, Any]] = {
    "modelopt fp8": _of_modelopt("FP8", 8),
    "modelopt": _of_modelopt("NVFP4", 4, group_size=16),
    "nvfp4": _of_llm_compressor("nvfp4-pack-quantized", "tensor_group", 16),
    "mxfp4": _of_llm_compressor("mxfp4-pack-quantized", "group", 32),
}


def quantise_floats(original: Path, quantised: Path, twin: Path, layout: FloatLayout) -> None:
    """Quantises the linear layers of a checkpoint in 16 or 32 bits; folders `quantised` and `twin` are copies of it.

    quantised: gets codes and scales, and the scales of inputs, keys and values that tools write too.
    twin: gets the values that they stand for, in fp32.
    """
    stored, plain = {}, {}
    for name, tensor in load_file(original / FILE).items():
        module, _, what = name.rpartition(".")
        if what != "weight" or not module.endswith(("_proj", ".w1", ".w2", ".w3")):
            stored[name], plain[name] = tensor, tensor.float()
            continue
        tensors, values = _quantised(tensor.float().numpy(), layout)
        stored |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
        plain[name] = torch.from_numpy(values)
        if layout.startswith("modelopt"):
            stored[f"{module}.input_scale"] = torch.tensor(0.5)
            if module.endswith((".k_proj", ".v_proj")):
                stored[f"{module}.{module[-6]}_scale"] = torch.tensor(0.25)
        elif layout == "nvfp4":
            stored[f"{module}.input_global_scale"] = torch.tensor([32.0])
    save_file(stored, quantised / FILE)
    save_file(plain, twin / FILE)
    config = json.loads((original / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[layout]}))


def _quantised(weight: Floats, layout: FloatLayout) -> tuple[dict[str, torch.Tensor], Floats]:
    """Returns the tensors of a projection [out, in], and its values."""
    largest = np.abs(weight).max()
    if layout == "modelopt fp8":
        scale = np.float32(largest / 448)
        codes = _nearest(np.abs(weight) / scale, E4M3)
        values = np.where(weight < 0, -E4M3[codes], E4M3[codes]) * scale
        tensors = {"weight": _e4m3(np.where(weight < 0, codes + 128, codes)), "weight_scale": torch.tensor(scale)}
        return tensors, values.astype(np.float32)
    size = 32 if layout == "mxfp4" else 16
    groups = weight.reshape(len(weight), -1, size)
    of_groups = np.abs(groups).max(axis=2) / 6
    if layout == "mxfp4":
        exponents = np.ceil(np.log2(of_groups)).astype(np.int64) + 127
        scales = (2.0 ** (exponents - 127)).astype(np.float32)
        tensors = {"weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
    else:
        of_tensor = np.float32(largest / (6 * 448))
        if layout == "nvfp4":
            divisor = np.float32(1) / of_tensor
            of_tensor = np.float32(1) / divisor  # may differ from what it was
        codes = _nearest(of_groups / of_tensor, E4M3)
        scales = E4M3[codes] * of_tensor
        tensors = {"weight_scale": _e4m3(codes)}
        if layout == "nvfp4":
            tensors["weight_global_scale"] = torch.tensor([divisor])
        else:
            tensors["weight_scale_2"] = torch.tensor(of_tensor)
    halves = _nearest(np.abs(groups) / scales[..., None], E2M1)
    values = np.where(groups < 0, -E2M1[halves], E2M1[halves]) * scales[..., None]
    assert values.dtype == np.float32
    halves = (halves + 8 * (groups < 0)).reshape(weight.shape).astype(np.uint8)
    tensors["weight" if layout == "modelopt" else "weight_packed"] = torch.from_numpy(
        halves[:, ::2] | halves[:, 1::2] << 4
    )
    return tensors, values.reshape(weight.shape)


def _nearest(numbers: npt.NDArray[Any], values: Floats) -> npt.NDArray[np.int64]:
    """Returns the places of the nearest values, of which each is larger than the one before."""
    return np.searchsorted((values[1:] + values[:-1]) / 2, numbers)


def _e4m3(codes: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
