"""Weights of a checkpoint as they are loaded, and the memory that tensors take meanwhile."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.model.checkpoint_part import CheckpointPart
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.dummy_weights import RandomWeights
from engine.model.weights import WeightsReader
from engine.parallel.group import SINGLE_RANK, ParallelGroup
from kernels.families import reference_ops

BLOCK_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        *(f"model.layers.{layer}.linear_attn.in_proj_ba" for layer in range(3)),
        *(f"model.layers.{layer}.mlp.shared_expert_gate" for layer in range(3)),
    ],
}
"""The `quantization_config` that Qwen3 and DeepSeek publish; the list names modules that are no linear layers too."""

BLOCK_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 128}
"""Sizes of a model whose matrices, halved among two ranks too, consist of whole blocks."""

BLOCK_EXPERTS = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""The same of experts and delta rules of Qwen3-Next."""


def quantized_in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 8-bit values [out, in] and scales [blocks of rows, blocks of columns]; the last blocks may be partial."""
    num_rows, num_columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -num_columns % 128, 0, -num_rows % 128))
    blocks = padded.view(len(padded) // 128, 128, -1, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    return values[:num_rows, :num_columns].contiguous(), scales


def save_block_scaled(original: Path, folder: Path, *, twin: Path | None = None) -> Path:
    """Writes a copy of a checkpoint with 8-bit weights and scales per block; returns its folder.

    twin gets the same weights in float32.
    """
    shutil.copytree(original, folder)
    stored, plain = {}, {}
    for name, tensor in load_file(original / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if name.endswith(("_proj.weight", ".in_proj_qkvz.weight")):
            values, scales = quantized_in_blocks(tensor)
            stored |= {name: values, f"{name}_scale_inv": scales}
            factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = values.float() * factors[: len(values), : values.shape[1]]
    save_file(stored, folder / "model.safetensors")
    if twin is not None:
        shutil.copytree(original, twin)
        save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCK_CONFIG}))
    return folder


def loaded_parts(
    path: Path,
    *,
    load_format: Literal["safetensors", "dummy"] = "safetensors",
    seed: int = 0,
    group: ParallelGroup = SINGLE_RANK,
) -> dict[str, CheckpointPart]:
    """Returns name -> part of each weight as loaded in float32, before it is packed."""
    config = ModelConfig.from_dir(path)
    model = Decoder(
        config,
        reference_ops(),
        max_positions=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=group,
    )
    parts = {
        name: part._replace(tensor=torch.empty_like(part.tensor, device="cpu"))
        for name, part in model.checkpoint_parts().items()
    }
    fill = RandomWeights(parts, seed).fill if load_format == "dummy" else WeightsReader(path, parts).fill
    fill(parts)
    return parts


def loaded_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of a checkpoint as the decoder has them, by their names."""
    return {name: part.tensor for name, part in loaded_parts(path).items()}


def check_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Asserts equal names and equal values."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures memory of tensors made inside the context, on any device, with `counts_meta` also on `meta`.

    Attributes:
        bytes, peak_bytes: live storages now, and the most at any time.
    """

    def __init__(self, *, counts_meta: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts_meta = counts_meta
        self.peak_bytes = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes(self) -> int:
        self._storages = {key: value for key, value in self._storages.items() if not value[0].expired()}  # type: ignore[no-untyped-call]
        return sum(num_bytes for _, num_bytes in self._storages.values())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (self._counts_meta or not leaf.is_meta):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._storages[storage._cdata] = reference, storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return out
