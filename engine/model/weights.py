"""Loads weights by name from the files of a checkpoint: safetensors, or GGUF."""

import logging
import math
import re
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.model.checkpoint import Checkpoint, decoder_tensors, open_checkpoint
from engine.model.checkpoint_file import open_regular
from engine.model.checkpoint_part import CheckpointPart
from engine.model.gguf_checkpoint import GgufCheckpoint
from engine.model.gguf_file import LOADED_TYPES, REQUANTIZED_TYPES
from engine.model.gguf_tensors import GgufTensors
from engine.model.joint_experts import ExpertReader, ExpertRows, split_joint_experts
from engine.model.output_head import EMBEDDING_WEIGHT, HEAD_WEIGHT
from engine.model.safetensors_file import FP8_NAME
from engine.model.tensor_entry import TensorEntry
from kernels.fp8_weights import FP8_DTYPE

_SAMPLE_BYTES = 4096
_MAX_VECTOR_BYTES = 16 << 20  # 4 bytes for each of the most hidden units
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, FP8_NAME: FP8_DTYPE}
_EXACT = {FP8_DTYPE: (FP8_NAME,), torch.int32: ("I32", "U32"), torch.int8: ("I8",), torch.uint8: ("U8",)}
"""Types of quantised weights, which are read as they are; others are converted to the dtype of the parameter."""

_DESCRIPTION = {".gguf": "the metadata"}
"""What says which shapes a model has, if it is not config.json."""

_KV_SCALE = re.compile(
    r"model\.layers\.\d+\.self_attn\."
    r"(k_scale|v_scale|kv_scale|(k|v|kv_a|kv_b)_proj(_with_mqa)?\.(output_scale|[kv]_scale))"
)

_ACTIVATION_SCALES = {
    "input_scale": "weight_scale",
    "input_global_scale": "weight_global_scale",
    "activation_scale": "weight_scale_inv",
}
"""Names of scales of activations, and of those of weights beside them."""

_SCALES = (
    ".weight_scale", ".weight_scale_2", ".weight_global_scale", ".input_scale", ".input_global_scale", ".k_scale",
    ".v_scale", ".scales", ".biases",
)  # fmt: skip
"""Ends of the names of scales, which are read in a dtype of their own or not used, whatever that of weights is."""

Progress = Callable[[int, int], None]
"""Called with the bytes read, checked or packed so far, and the total."""

_log = logging.getLogger(__name__)


class CheckedWeights(NamedTuple):
    """Result of `check_weights`.

    Attributes:
        shards: file -> names of the tensors to read from it, with the bytes of each.
        stored_names: name in the decoder -> name in the file.
        num_activation_scales, num_kv_scales: scales of activations, and of keys and values, in the checkpoint, which
            are not used.
        expert_rows: name in the file -> where the tensor is, of those that `split_joint_experts` has named.
    """

    shards: dict[Path, dict[str, int]]
    stored_names: dict[str, str]
    num_activation_scales: int
    num_kv_scales: int
    expert_rows: dict[str, ExpertRows]


class WeightsReader:
    """Fills parameters from a checkpoint and converts them to their dtype. A rank reads only its own part.

    All headers are checked before the first byte is copied, so that a broken checkpoint is reported at once. Tensors
    are read in the order of `fill`; one file is open at a time, because pages of an open file count as used memory.
    """

    def __init__(
        self,
        path: Path,
        parts: dict[str, CheckpointPart],
        names: Container[str] | None = None,
        *,
        others: Container[str] = (),
        progress: Progress | None = None,
    ) -> None:
        """Checks the checkpoint.

        Args:
            path: the checkpoint.
            parts: name in the checkpoint -> part of each parameter of the model; their tensors are not used.
            names: those that will be filled; None: all.
            others: names in the decoder of tensors that are read in another way, or in another way too.
            progress: called after each tensor.
        Raises: CheckpointError: a missing, unreadable, truncated or corrupt file; a missing tensor, one of another
            shape, or one that the model does not have; NaN or infinity.
        """
        self._checkpoint = open_checkpoint(path)
        shards, self._stored_names, num_activation_scales, num_kv_scales, self._expert_rows = check_weights(
            path, parts, others
        )
        if num_activation_scales:
            _log.info(
                "%d scales of activations (input_scale) in the checkpoint are not used: where products round "
                "activations, they compute a scale per token",
                num_activation_scales,
            )
        if num_kv_scales:
            _log.info(
                "%d key and value scales of the checkpoint are not used: an 8-bit cache (--kv-cache-dtype) computes a "
                "scale per token and head instead",
                num_kv_scales,
            )
        kinds = {
            entry.dtype for file in shards for entry in self._checkpoint.tensors(file).values()
        } & REQUANTIZED_TYPES.keys()
        if kinds:
            _log.info(
                "tensors in %s are dequantised, and the matrices of layers kept in 8 bits, groups of 32 (as Q8_0)",
                ", ".join(sorted(kinds)),
            )
        self._file_of = {name: file for file, sizes in shards.items() for name in sizes}
        self._sizes = {name: num_bytes for sizes in shards.values() for name, num_bytes in sizes.items()}
        self._total = sum(num_bytes for name, num_bytes in self._sizes.items() if names is None or name in names)
        self._loaded = 0
        self._progress = progress
        self._open_file: Path | None = None
        self._reader: Any = None

    def fill(self, parts: dict[str, CheckpointPart]) -> None:
        """Reads parts into their tensors.

        Raises: CheckpointError: a file cannot be read, or a value is beyond the range of float16.
        """
        for name, part in parts.items():
            file = self._file_of[name]
            try:
                if file != self._open_file:
                    self._open_file, self._reader = file, self._open(file)
                _fill(part, self._reader, self._stored_names[name], file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: cannot be read: {error}") from error
            self._loaded += self._sizes[name]
            if self._progress is not None:
                self._progress(self._loaded, self._total)

    def _open(self, file: Path) -> Any:
        """Returns what reads tensors of a file by their names in it."""
        reader = open_tensors(self._checkpoint, file)
        return ExpertReader(reader, self._expert_rows) if self._expert_rows else reader


def open_tensors(checkpoint: Checkpoint, file: Path) -> Any:
    """Returns what reads tensors of a file by their names in it, with the interface of `safetensors.safe_open`."""
    if isinstance(checkpoint, GgufCheckpoint):
        return GgufTensors(file, checkpoint.tensors(file), checkpoint.layout)
    return safe_open(file, framework="pt")


def _fill(part: CheckpointPart, reader: Any, name: str, file: Path) -> None:
    if part.tensor.dtype is torch.uint8 and isinstance(reader, GgufTensors):
        values = part.read(reader.get_blocks(name))
    elif part.is_row_scale:
        scales = reader.get_tensor(name).flatten()
        values = scales if scales.numel() == 1 else part.read(scales)
    else:
        values = reader.get_tensor(name) if part.is_whole else part.read(reader.get_slice(name))
    part.tensor.copy_(values.view(torch.int32) if values.dtype is torch.uint32 else values)
    if part.tensor.dtype is torch.float16 and values.dtype is not torch.float16:
        lowest, highest = part.tensor.aminmax()
        if lowest.isinf() or highest.isinf():
            raise CheckpointError(
                f"{file}: tensor {name} has values beyond 65504, the limit of float16: use --dtype bfloat16 or float32"
            )


def check_headers(path: Path) -> None:
    """Checks that the files of a checkpoint are complete.

    Raises: CheckpointError: one is missing, truncated or corrupt.
    """
    checkpoint = open_checkpoint(path)
    for file in checkpoint.weights_files():
        checkpoint.tensors(file)


def check_weights(path: Path, parts: dict[str, CheckpointPart], others: Container[str] = ()) -> CheckedWeights:
    """Checks all headers and the beginning of each tensor, and returns what to read.

    Args:
        path, parts, others: see `WeightsReader`.
    Raises: CheckpointError: see `WeightsReader`.
    """
    shards: dict[Path, dict[str, int]] = {}
    stored_names: dict[str, str] = {}
    checkpoint = open_checkpoint(path)
    decoder_name = checkpoint.decoder_names()
    num_activation_scales = num_kv_scales = 0
    files = checkpoint.weights_files()
    is_head_embedding = _is_head_embedding(checkpoint, files, parts)
    expert_rows: dict[str, ExpertRows] = {}
    for file in files:
        sampled = {}
        tensors, rows = split_joint_experts(file, checkpoint.tensors(file), decoder_name, parts)
        expert_rows |= rows
        for stored, entry in tensors.items():
            name = decoder_name(stored)
            if name == HEAD_WEIGHT and is_head_embedding:
                name = EMBEDDING_WEIGHT
            if name is None:
                continue
            if name in others and name not in parts:
                if name.endswith(".weight"):  # not masks, which may be infinite
                    sampled[stored] = entry
                continue
            if name not in parts:
                is_activation_scale = _is_activation_scale(name, parts)
                num_activation_scales += is_activation_scale
                num_kv_scales += is_kv_scale(name)
                is_known = is_activation_scale or is_kv_scale(name) or _is_ignorable(name)
                if not is_known and not _is_redundant(file, name, entry, parts):
                    raise CheckpointError(f"{file}: tensor {stored} is not part of this architecture")
                continue
            if name in stored_names:
                raise CheckpointError(f"{file}: tensor {stored} is there twice, here or in another file, as {name}")
            _check_entry(file, stored, entry, parts[name])
            stored_names[name] = stored
            sampled[stored] = entry
            num_bytes = (entry.stop - entry.start) * parts[name].tensor.numel() // math.prod(parts[name].shape)
            shards.setdefault(file, {})[name] = num_bytes
        _check_samples(file, sampled)
    if missing := sorted(parts.keys() - stored_names.keys()):
        raise CheckpointError(f"{path}: {len(missing)} of {len(parts)} tensors are missing, the first is {missing[0]}")
    return CheckedWeights(shards, stored_names, num_activation_scales, num_kv_scales, expert_rows)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a scale of keys or values, which is not used."""
    return _KV_SCALE.fullmatch(name) is not None


def _is_activation_scale(name: str, parts: Container[str]) -> bool:
    module, _, last = name.rpartition(".")
    return last in _ACTIVATION_SCALES and f"{module}.{_ACTIVATION_SCALES[last]}" in parts


def exact_dtype(path: Path, counts: Callable[[str, TensorEntry], bool] | None = None) -> torch.dtype:
    """Returns the dtype that holds all tensors of a checkpoint, but for rotary frequencies, without rounding.

    It is that of all tensors, or float32 if they differ. Vectors in float32, such as the norms of GGUF files in 16
    bits, count as tensors of another dtype that holds their numbers. Scales of 8 and 4-bit floats do not count.

    Args:
        path: the checkpoint.
        counts: whether a tensor counts, by its name in the decoder; None: all do.
    Raises: CheckpointError: a file is missing, unreadable, truncated or corrupt.
    """
    dtypes: set[torch.dtype] = set()
    vectors: list[tuple[Path, TensorEntry]] = []
    for name, file, _, entry in decoder_tensors(open_checkpoint(path)):
        if _is_of_rotation(name) or name.endswith(_SCALES):
            continue
        if counts is not None and not counts(name, entry):
            continue
        if entry.dtype == "F32" and len(entry.shape) == 1:
            vectors.append((file, entry))
        elif entry.dtype in LOADED_TYPES:  # stands for numbers in float32
            dtypes.add(torch.float32)
        elif entry.dtype in _DTYPES:  # others are reported by `check_weights`
            dtypes.add(_DTYPES[entry.dtype])
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    is_exact = dtype.itemsize == 2 and all(_holds(dtype, file, entry) for file, entry in vectors)
    return dtype if is_exact else torch.float32


def _holds(dtype: torch.dtype, file: Path, vector: TensorEntry) -> bool:
    """Whether a dtype has all numbers of a vector in float32."""
    if vector.stop - vector.start > _MAX_VECTOR_BYTES:
        return False
    with open_regular(file) as reader:
        reader.seek(vector.start)
        data = bytearray(reader.read(vector.stop - vector.start))
    values = torch.frombuffer(data, dtype=torch.float32) if data else torch.empty(0)
    return torch.equal(values.to(dtype).float(), values)


def _check_samples(file: Path, entries: dict[str, TensorEntry]) -> None:
    """Checks the beginning of each tensor, which detects one that is entirely NaN before the long load.

    Single NaNs are detected by the warm-up, which cannot name the tensor: checking all values would take as long as
    reading them a second time.
    """
    with open_regular(file) as reader:
        for name, entry in entries.items():
            if entry.dtype not in _DTYPES:
                continue  # integers
            reader.seek(entry.start)
            data = bytearray(reader.read(min(_SAMPLE_BYTES, entry.stop - entry.start)))
            if data and not torch.isfinite(torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).float()).all():
                raise CheckpointError(f"{file}: tensor {name} holds NaN or infinity")


def _is_redundant(file: Path, name: str, entry: TensorEntry, parts: dict[str, CheckpointPart]) -> bool:
    """Whether a tensor beside integers tells nothing.

    It is the shape of a matrix, groups of inputs in their order, or a bias of zeros, as AutoGPTQ writes.
    """
    if f"{name.removesuffix('weight_shape')}weight_packed" in parts:
        return True
    if name.endswith(".g_idx"):
        return _are_in_order(file, entry, parts.get(f"{name.removesuffix('g_idx')}scales"))
    if not name.endswith(".bias") or f"{name.removesuffix('bias')}qweight" not in parts:
        return False
    with open_regular(file) as reader:
        reader.seek(entry.start)
        return not any(reader.read(entry.stop - entry.start))


def _are_in_order(file: Path, groups: TensorEntry, scales: CheckpointPart | None) -> bool:
    """Whether each input is of the group that its place tells; scales: those of the groups."""
    if (
        scales is None
        or groups.dtype != "I32"
        or len(groups.shape) != 1
        or not groups.shape[0]
        or groups.shape[0] % scales.shape[0]
    ):
        return False
    with open_regular(file) as reader:
        reader.seek(groups.start)
        stored = torch.frombuffer(bytearray(reader.read(groups.stop - groups.start)), dtype=torch.int32)
    return torch.equal(stored, torch.arange(len(stored), dtype=torch.int32) // (len(stored) // scales.shape[0]))


def _check_entry(file: Path, name: str, entry: TensorEntry, part: CheckpointPart) -> None:
    shapes = [part.shape]
    has_blocks = part.tensor.dtype is torch.uint8 and entry.dtype in LOADED_TYPES  # of a GGUF file
    if has_blocks:
        block = LOADED_TYPES[entry.dtype]
        shapes = [(part.shape[0], part.shape[1] // block.num_bytes * block.numbers)]
    if part.is_row_scale:  # one per row, or one for the whole matrix
        shapes += [(*part.shape, 1), (1,), (1, 1), ()]
    if entry.shape not in shapes:
        description = _DESCRIPTION.get(file.suffix, "config.json")
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(entry.shape)}, {description} requires {list(shapes[0])}"
        )
    required = None if has_blocks else _EXACT.get(part.tensor.dtype)
    if required is not None and entry.dtype not in required:
        names = " or ".join(required)
        raise CheckpointError(f"{file}: tensor {name} is {entry.dtype}, quantization_config requires {names}")
    is_number = entry.dtype in _DTYPES or entry.dtype in LOADED_TYPES
    if required is None and (not is_number or entry.dtype == FP8_NAME):
        raise CheckpointError(f"{file}: tensor {name} is {entry.dtype}, supported for this tensor are F32, F16, BF16")


def _is_head_embedding(checkpoint: Checkpoint, files: Sequence[Path], parts: Container[str]) -> bool:
    """Whether files have the one matrix of tied embeddings under the name of the output head.

    `safetensors` names it so where it removes one of two names of shared memory; `transformers` reads it too.
    """
    if EMBEDDING_WEIGHT not in parts or HEAD_WEIGHT in parts:
        return False
    decoder_name = checkpoint.decoder_names()
    names = {decoder_name(stored) for file in files for stored in checkpoint.tensors(file)}
    return HEAD_WEIGHT in names and EMBEDDING_WEIGHT not in names


def _is_ignorable(name: str) -> bool:
    """Whether a tensor is redundant: a second copy of a tied output head, or rotary frequencies."""
    return name == HEAD_WEIGHT or _is_of_rotation(name)


def _is_of_rotation(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")
