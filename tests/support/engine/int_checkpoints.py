"""Checkpoints in integers as GPTQ, AWQ and llm-compressor write them, packed integer by integer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
Ints = npt.NDArray[np.int64]


class Scheme(NamedTuple):
    """How a checkpoint is quantised.

    Attributes:
        layout: gptq, gptq_v2, awq, packed or int8.
        num_bits: 4 or 8.
        group_size: inputs that share a scale; -1: all.
        symmetric: whether zero points are the middle of the range.
        shuffled: whether groups are of inputs in a random order, as with desc_act.
        int8_inputs: whether inputs are meant to be in int8.
    """

    layout: str
    num_bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    shuffled: bool = False
    int8_inputs: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Returns its `quantization_config`."""
        if self.layout.startswith("gptq"):
            return {
                "quant_method": "gptq",
                "bits": self.num_bits,
                "group_size": self.group_size,
                "desc_act": self.shuffled,
                "sym": self.symmetric,
                "lm_head": False,
                "checkpoint_format": self.layout,
            }
        if self.layout == "awq":
            return {
                "quant_method": "awq",
                "bits": self.num_bits,
                "group_size": self.group_size,
                "zero_point": not self.symmetric,
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        weights = {
            "num_bits": self.num_bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.group_size == -1 else "group",
            "group_size": None if self.group_size == -1 else self.group_size,
            "actorder": "group" if self.shuffled else None,
        }
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if self.int8_inputs else None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self.layout == "packed" else "int-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


def quantise_checkpoint(original: Path, quantised: Path, twin: Path, scheme: Scheme) -> None:
    """Quantises the projections of a checkpoint; folders `quantised` and `twin` are copies of the original.

    quantised: gets the integers.
    twin: gets the values of the same integers, in fp32.
    """
    stored, plain = {}, {}
    order = np.random.default_rng(0)
    orders: dict[int, Ints] = {}
    for name, tensor in load_file(original / FILE).items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", ".in_proj_qkv", ".in_proj_z", ".in_proj_qkvz")):
            stored[name] = plain[name] = tensor
            continue
        num_in = tensor.shape[1]
        if num_in not in orders:
            orders[num_in] = order.permutation(num_in) if scheme.shuffled else np.arange(num_in)
        tensors, plain[name] = _quantised(tensor.double().numpy(), scheme, orders[num_in])
        stored |= {f"{module}.{suffix}": torch.from_numpy(value) for suffix, value in tensors.items()}
        if scheme.layout == "gptq":
            stored.setdefault(f"{module}.bias", torch.zeros(len(tensor), dtype=torch.float16))
    save_file(stored, quantised / FILE)
    save_file({name: tensor.float() for name, tensor in plain.items()}, twin / FILE)
    config = json.loads((original / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))


def _quantised(
    weight: npt.NDArray[np.float64], scheme: Scheme, order: Ints
) -> tuple[dict[str, npt.NDArray[Any]], torch.Tensor]:
    """Returns the tensors of a projection, and the exact values of the integers."""
    num_out, num_in = weight.shape
    size = num_in if scheme.group_size == -1 else scheme.group_size
    group_of = np.empty(num_in, dtype=np.int64)
    group_of[order] = np.arange(num_in) // size
    num_groups, largest = num_in // size, 2**scheme.num_bits - 1
    scales, zeros = np.empty((num_out, num_groups), np.float16), np.empty((num_out, num_groups), np.int64)
    for group in range(num_groups):
        part = weight[:, group_of == group]
        if scheme.symmetric:
            scales[:, group] = 2 * np.abs(part).max(axis=1) / largest
            zeros[:, group] = (largest + 1) // 2
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scales[:, group] = (high - low) / largest
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 1, largest)
    factors, offsets = scales.astype(np.float64)[:, group_of], zeros[:, group_of]
    values = np.clip(np.round(weight / factors) + offsets, 0, largest).astype(np.int64)
    exact = torch.from_numpy((values - offsets) * factors)
    return _stored(scheme, values, scales, zeros, group_of.astype(np.int32)), exact


def _stored(
    scheme: Scheme, values: Ints, scales: npt.NDArray[np.float16], zeros: Ints, group_of: npt.NDArray[np.int32]
) -> dict[str, npt.NDArray[Any]]:
    bits, in_order = scheme.num_bits, range(32 // scheme.num_bits)
    middle = 2 ** (bits - 1)
    match scheme.layout:
        case "gptq" | "gptq_v2":
            shift = 1 if scheme.layout == "gptq" else 0
            return {
                "qweight": _words(values, bits, in_order).T.copy(),
                "scales": scales.T.copy(),
                "qzeros": _words(zeros.T - shift, bits, in_order),
                "g_idx": group_of,
            }
        case "awq":
            places = (0, 2, 4, 6, 1, 3, 5, 7)
            return {
                "qweight": _words(values.T, bits, places),
                "scales": scales.T.copy(),
                "qzeros": _words(zeros.T, bits, places),
            }
        case "packed":
            stored: dict[str, npt.NDArray[Any]] = {
                "weight_packed": _words(values, bits, in_order),
                "weight_scale": scales,
                "weight_shape": np.array(values.shape),
            }
            if not scheme.symmetric:
                stored["weight_zero_point"] = _words(zeros.T, bits, in_order).T.copy()
            if scheme.shuffled:
                stored["weight_g_idx"] = group_of
            return stored
    stored = {"weight": (values - middle).astype(np.int8), "weight_scale": scales}
    return stored if scheme.symmetric else stored | {"weight_zero_point": (zeros - middle).astype(np.int8)}


def _words(values: Ints, bits: int, places: Sequence[int]) -> npt.NDArray[np.int32]:
    """Packs [rows, n] along rows: the integer at places[i] of each word's columns goes to its bits from i * bits on."""
    per_word = len(places)
    words = np.zeros((values.shape[0], values.shape[1] // per_word), dtype=np.uint32)
    for column in range(words.shape[1]):
        for shift, place in enumerate(places):
            words[:, column] |= values[:, column * per_word + place].astype(np.uint32) << np.uint32(shift * bits)
    return words.view(np.int32)
