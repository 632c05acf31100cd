"""Reads LoRA adapters (arXiv:2106.09685) in the format of PEFT: adapter_config.json and adapter_model.safetensors.

An adapter changes the weights W of linear layers to W + scale * B A, with scale = lora_alpha / r, or with `use_rslora`
lora_alpha / sqrt(r) (arXiv:2312.03732). Files are untrusted: everything is checked against the model before a tensor
is read, and what would change the model in another way is refused.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.model.checkpoint_file import exists, open_regular
from engine.model.config_fields import ConfigFields
from engine.model.safetensors_file import FP8_NAME, read_safetensors_header
from kernels.interface import LowRank

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 512
"""Largest rank. On the hub nearly all have 8 to 64."""

_PREFIX = "base_model.model."

_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_bdlora": (False,),
    "kasa_config": (),
    "arrow_config": (),
    "monteclora_config": (),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    # Others change the weights of the base model too.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings under which an adapter is B A alone, one rank for all layers; null counts as absent."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A checked adapter of a model, whose matrices are still in its file.

    Attributes:
        name: name of the adapter in requests.
        folder: with its two files.
        rank: terms of each change, r.
        scale: factor of each change.
        modules: the linear layers that it changes, such as `model.layers.0.self_attn.q_proj`.
        max_bytes: most memory that it takes, in fp32 and padded.
        sha256: digest of both files.
    """

    name: str
    folder: Path
    rank: int
    scale: float
    modules: frozenset[str]
    max_bytes: int
    sha256: bytes

    @classmethod
    def open(cls, name: str, folder: Path, layers: Mapping[str, tuple[int, int]]) -> "LoraAdapter":
        """Checks an adapter.

        Args:
            name: name of the adapter in requests.
            folder: with its two files.
            layers: rows and columns of each linear layer of the model.
        Raises: CheckpointError: a file is missing, cannot be read, is truncated or corrupt, or the adapter does not fit
            the model: names the field and the numbers.
        """
        config_path, weights_path = folder / CONFIG_FILE, folder / WEIGHTS_FILE
        if not exists(config_path):
            raise CheckpointError(f"{config_path}: no such file; an adapter is a folder with {CONFIG_FILE}, from PEFT")
        fields = ConfigFields.from_file(config_path)
        if (kind := fields.raw("peft_type", "absent")) != "LORA":
            raise fields.error("peft_type", f"is {kind!r}, supported is 'LORA'")
        for field, values in _PLAIN_VALUES.items():
            if field in fields and (value := fields.raw(field)) not in values:
                listed = " or ".join(map(repr, values)) or "null"
                raise fields.error(field, f"is {value!r}, supported is {listed}; merge the adapter into its model")
        rank = fields.integer("r", maximum=MAX_RANK)
        alpha = fields.number("lora_alpha")
        _check_targets(fields, layers)
        modules = _checked_modules(weights_path, rank, layers)
        targets = fields.raw("target_modules", None)
        for target in targets if isinstance(targets, list) else ():
            if not any(_is_target(target, module) for module in modules):
                raise fields.error("target_modules", f"names {target!r}, of which {WEIGHTS_FILE} has no tensors")
        digest = hashlib.sha256()
        for path in (config_path, weights_path):
            digest.update(_sha256(path))
        scale = alpha / math.sqrt(rank) if fields.flag("use_rslora", False) else alpha / rank
        max_values = sum(
            columns * (rank + 31) + (rows + 31) * rank for rows, columns in map(layers.__getitem__, modules)
        )
        return cls(name, folder, rank, scale, modules, 4 * max_values, digest.digest())

    def read(self) -> dict[str, LowRank]:
        """Returns the change of each layer: A [rank, columns], and B [rows, rank] times the scale, both fp32.

        Raises: CheckpointError: the file cannot be read any more, or a tensor holds NaN or infinity.
        """
        path = self.folder / WEIGHTS_FILE
        changes = {}
        try:
            with safe_open(path, framework="pt") as reader:
                for module in sorted(self.modules):
                    a, b = (reader.get_tensor(name).float() for name in _tensor_names(module))
                    changes[module] = LowRank(a, b * self.scale)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        for module, change in changes.items():
            for name, matrix in zip(_tensor_names(module), (change.a, change.b), strict=True):
                if not matrix.isfinite().all():
                    raise CheckpointError(f"{path}: tensor {name} holds NaN or infinity")
        return changes


def _sha256(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.digest()


def _tensor_names(module: str) -> tuple[str, str]:
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def _is_target(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _check_targets(fields: ConfigFields, layers: Mapping[str, tuple[int, int]]) -> None:
    """Checks the list of target modules; a pattern is checked by the tensors that it led to."""
    targets = fields.raw("target_modules", None)
    if isinstance(targets, str | None):
        return
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise fields.error("target_modules", f"is {targets!r}, expected a list of names, or a pattern")
    for target in targets:
        if not any(_is_target(target, layer) for layer in layers):
            supported = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
            raise fields.error("target_modules", f"names {target!r}, the linear layers of this model are {supported}")


def _checked_modules(path: Path, rank: int, layers: Mapping[str, tuple[int, int]]) -> frozenset[str]:
    """Returns the layers whose matrices a file holds, after checking their names, types and shapes."""
    if not exists(path):
        raise CheckpointError(f"{path}: no such file; only adapters in safetensors are read")
    tensors = read_safetensors_header(path)
    shapes = {
        name: shape
        for layer, (rows, columns) in layers.items()
        for name, shape in zip(_tensor_names(layer), ((rank, columns), (rows, rank)), strict=True)
    }
    for name, entry in tensors.items():
        if name not in shapes:
            raise CheckpointError(
                f"{path}: tensor {name[:200]} changes none of the {len(layers)} linear layers of this model"
            )
        if entry.dtype == FP8_NAME:
            raise CheckpointError(f"{path}: tensor {name} is {entry.dtype}, supported are F32, F16, BF16")
        if entry.shape != shapes[name]:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(entry.shape)}, r in {CONFIG_FILE} and the model require "
                f"{list(shapes[name])}"
            )
    modules = frozenset(layer for layer in layers if any(name in tensors for name in _tensor_names(layer)))
    for module in sorted(modules):
        for name in _tensor_names(module):
            if name not in tensors:
                raise CheckpointError(f"{path}: tensor {name} is missing")
    if not modules:
        raise CheckpointError(f"{path}: holds no tensors")
    return modules
