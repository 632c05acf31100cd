"""Reads LoRA adapters (arXiv:2106.09685) in the format of PEFT: adapter_config.json and adapter_model.safetensors.

An adapter changes the weights W of linear layers to W + scale * B A, with scale = lora_alpha / r, or with `use_rslora`
lora_alpha / sqrt(r) (arXiv:2312.03732). Files are untrusted: everything is checked against the model before a tensor
is read, and what would change the model in another way is refused.
"""

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_file import open_regular, parse_json, read_open_file
from engine.model.config_fields import ConfigFields
from engine.model.safetensors_file import read_open_header
from engine.model.tensor_entry import TensorEntry
from engine.model.text_part import decoder_name
from kernels.interface import LowRank

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 512
"""Largest rank. On the hub nearly all have 8 to 64."""

MAX_CONFIG_BYTES = 1 << 20
"""Largest config. Parsing holds the GIL, for milliseconds."""
MAX_HEADER_BYTES = 1 << 16
_HEADER_BYTES_PER_TENSOR = 512
"""Largest header: the first for metadata, the second for each matrix that an adapter of the model may have."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

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


OpenFile: TypeAlias = Callable[[Path], BufferedReader]
"""Opens a regular file; raises FileNotFoundError or CheckpointError."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A checked adapter of a model, whose matrices are still in its file.

    Attributes:
        name: name of the adapter in requests.
        folder: with its two files.
        rank: terms of each change, r.
        scale: factor of each change.
        modules: the linear layers that it changes, such as `model.layers.0.self_attn.q_proj`.
        tensors: where the matrices are in the file.
        version: of the file with the matrices: changes when the file does.
        sha256: digest of both files.
        open_file: opens them.
    """

    name: str
    folder: Path
    rank: int
    scale: float
    modules: frozenset[str]
    tensors: Mapping[str, TensorEntry]
    version: tuple[int, ...]
    sha256: bytes
    open_file: OpenFile

    @classmethod
    def open(
        cls,
        name: str,
        folder: Path,
        layers: Mapping[str, tuple[int, int]],
        *,
        max_rank: int | None = None,
        open_file: OpenFile = open_regular,
    ) -> "LoraAdapter":
        """Checks an adapter.

        Args:
            name: name of the adapter in requests.
            folder: with its two files.
            layers: rows and columns of each linear layer of the model.
            max_rank: largest rank for which memory is reserved; None: up to MAX_RANK.
            open_file: opens the files.
        Raises: CheckpointError: a file is missing, cannot be read, is truncated or corrupt, or the adapter does not fit
            the model: names the field and the numbers.
        """
        config_path, weights_path = folder / CONFIG_FILE, folder / WEIGHTS_FILE
        try:
            with open_file(config_path) as file:
                config = read_open_file(config_path, file, MAX_CONFIG_BYTES)
        except FileNotFoundError:
            raise CheckpointError(
                f"{config_path}: no such file; an adapter is a folder with {CONFIG_FILE}, from PEFT"
            ) from None
        fields = ConfigFields.from_json(str(config_path), parse_json(str(config_path), config))
        if (kind := fields.raw("peft_type", "absent")) != "LORA":
            raise fields.error("peft_type", f"is {kind!r}, supported is 'LORA'")
        for field, values in _PLAIN_VALUES.items():
            if field in fields and (value := fields.raw(field)) not in values:
                listed = " or ".join(map(repr, values)) or "null"
                raise fields.error(field, f"is {value!r}, supported is {listed}; merge the adapter into its model")
        rank = fields.integer("r", maximum=MAX_RANK)
        if max_rank is not None and rank > max_rank:
            raise fields.error("r", f"is {rank}, --max-lora-rank is {max_rank}")
        alpha = fields.number("lora_alpha")
        _check_targets(fields, layers)
        digest = hashlib.sha256(hashlib.sha256(config).digest())
        try:
            with open_file(weights_path) as file:
                tensors = _checked_tensors(weights_path, file, rank, layers)
                version = _version(file)
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except FileNotFoundError:
            raise CheckpointError(f"{weights_path}: no such file; only adapters in safetensors are read") from None
        except OSError as error:
            raise CheckpointError(f"{weights_path}: cannot be read: {error.strerror}") from error
        modules = frozenset(layer for layer in layers if any(name in tensors for name in _tensor_names(layer)))
        _check_modules(weights_path, fields, modules, tensors)
        scale = alpha / math.sqrt(rank) if fields.flag("use_rslora", False) else alpha / rank
        return cls(name, folder, rank, scale, modules, tensors, version, digest.digest(), open_file)

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], LowRank | None]]:
        """Opens the matrices; yields a function that reads the change of a layer, None: it is not changed.

        A change has A [rank, columns], and B [rows, rank] times the scale, both fp32. The file is not mapped: one that
        is truncated meanwhile would end the process.

        Raises: CheckpointError: the file cannot be read any more, has changed since it was checked, or a tensor holds
            NaN or infinity.
        """
        path = self.folder / WEIGHTS_FILE
        try:
            with self.open_file(path) as file:
                self._check_version(path, file)
                yield partial(self._change, path, file)
                self._check_version(path, file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error

    def read(self) -> dict[str, LowRank]:
        """Returns the changes of all layers.

        Raises: CheckpointError: see `reading`.
        """
        with self.reading() as change_of:
            changes = {module: change_of(module) for module in sorted(self.modules)}
        return {module: change for module, change in changes.items() if change is not None}

    def _change(self, path: Path, file: BufferedReader, module: str) -> LowRank | None:
        if module not in self.modules:
            return None
        a, b = (self._matrix(path, file, name) for name in _tensor_names(module))
        b *= self.scale
        for name, matrix in zip(_tensor_names(module), (a, b), strict=True):
            if not matrix.isfinite().all():
                raise CheckpointError(f"{path}: tensor {name} holds NaN or infinity")
        return LowRank(a, b)

    def _matrix(self, path: Path, file: BufferedReader, name: str) -> torch.Tensor:
        entry = self.tensors[name]
        data = bytearray(entry.stop - entry.start)
        file.seek(entry.start)
        if (num_read := file.readinto(data)) != len(data):
            raise CheckpointError(f"{path}: tensor {name} has {num_read} of {len(data)} bytes: truncated meanwhile")
        return torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).view(entry.shape).float()

    def _check_version(self, path: Path, file: BufferedReader) -> None:
        if _version(file) != self.version:
            raise CheckpointError(f"{path}: has changed while it was read")


def adapter_bytes(rank: int, shapes: Iterable[tuple[int, int]]) -> int:
    """Returns the most memory that an adapter takes, in fp32 and padded; shapes: rows and columns of its layers."""
    return 4 * sum(columns * (rank + 31) + (rows + 31) * rank for rows, columns in shapes)


def _version(file: BufferedReader) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _tensor_names(module: str) -> tuple[str, str]:
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def _endings(names: Iterable[str]) -> set[str]:
    """Returns what a target may be to mean one of these modules: `a.b.c`, `b.c` or `c`."""
    endings: set[str] = set()
    for name in names:
        parts = name.split(".")
        endings.update(".".join(parts[first:]) for first in range(len(parts)))
    return endings


def _check_targets(fields: ConfigFields, layers: Mapping[str, tuple[int, int]]) -> None:
    """Checks the list of target modules; a pattern is checked by the tensors that it led to."""
    targets = fields.raw("target_modules", None)
    if isinstance(targets, str | None):
        return
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise fields.error("target_modules", f"is {targets!r}, expected a list of names, or a pattern")
    endings = _endings(layers)
    for target in targets:
        if target not in endings:
            supported = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
            raise fields.error(
                "target_modules",
                f"names {target!r}, the linear layers of this model that adapters can change are {supported}",
            )


def _checked_tensors(
    path: Path, file: BufferedReader, rank: int, layers: Mapping[str, tuple[int, int]]
) -> dict[str, TensorEntry]:
    """Returns the matrices in a file, after checking their names, types, shapes and places."""
    header = read_open_header(path, file, MAX_HEADER_BYTES + _HEADER_BYTES_PER_TENSOR * 2 * len(layers))
    shapes = {
        name: shape
        for layer, (rows, columns) in layers.items()
        for name, shape in zip(_tensor_names(layer), ((rank, columns), (rows, rank)), strict=True)
    }
    tensors: dict[str, TensorEntry] = {}
    for stored, entry in header.items():
        if (name := _own_name(stored, shapes)) in tensors:
            raise CheckpointError(f"{path}: tensor {stored} is there under another name too")
        tensors[name] = entry
    for name, entry in tensors.items():
        if name not in shapes:
            raise CheckpointError(
                f"{path}: tensor {name[:200]} changes none of the {len(layers)} linear layers of this model that "
                "adapters can change"
            )
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {name} is {entry.dtype}, supported are {', '.join(_DTYPES)}")
        if entry.shape != shapes[name]:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(entry.shape)}, r in {CONFIG_FILE} and the model require "
                f"{list(shapes[name])}"
            )
    end = None
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
        if end not in (None, entry.start):
            raise CheckpointError(f"{path}: tensor {name} begins at byte {entry.start}, the one before ends at {end}")
        end = entry.stop
    file.seek(0)
    return tensors


def _own_name(name: str, names: Collection[str]) -> str:
    """Returns the name of a tensor in an adapter of the decoder, if it is named as in one of a model for images too."""
    if name in names:
        return name
    own = f"{_PREFIX}{decoder_name(name.removeprefix(_PREFIX))}"
    return own if own in names else name


def _check_modules(
    path: Path, fields: ConfigFields, modules: frozenset[str], tensors: Mapping[str, TensorEntry]
) -> None:
    """Checks that the file has both matrices of each layer, and layers of each target."""
    for module in sorted(modules):
        for name in _tensor_names(module):
            if name not in tensors:
                raise CheckpointError(f"{path}: tensor {name} is missing")
    if not modules:
        raise CheckpointError(f"{path}: holds no tensors")
    targets, endings = fields.raw("target_modules", None), _endings(modules)
    for target in targets if isinstance(targets, list) else ():
        if target not in endings:
            raise fields.error("target_modules", f"names {target!r}, of which {WEIGHTS_FILE} has no tensors")
