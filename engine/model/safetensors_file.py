"""Reads and checks the header of a safetensors file, before any of its data is used.

The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

import math
import os
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import CheckpointError
from engine.model.checkpoint_file import open_regular, parse_json
from engine.model.tensor_entry import TensorEntry

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format. Without a limit, a corrupt length would allocate that much memory."""

FP8_NAME = "F8_E4M3"

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", FP8_NAME, "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}
"""Types of whole bytes. Tensors that no model reads, such as old masks of attention, may be of any type."""


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Reads the header and checks it against the size of the file.

    Returns: the tensors by name.

    Raises: CheckpointError: the file cannot be read, is truncated or corrupt.
    """
    try:
        with open_regular(path) as file:
            return read_open_header(path, file)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None


def read_open_header(path: Path, file: BinaryIO, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, TensorEntry]:
    """Reads the header of an open file, of at most max_bytes; otherwise like `read_safetensors_header`."""
    try:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, max_bytes):
            raise CheckpointError(f"{path}: header of {length} bytes in a file of {size} bytes: truncated or corrupt")
        raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    entries = parse_json(f"{path}: corrupt header", raw)
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: corrupt header: holds a {type(entries).__name__}, expected an object")
    data = 8 + length
    tensors = {name: _entry(path, name, values, data) for name, values in entries.items() if name != "__metadata__"}
    if (expected := max((entry.stop for entry in tensors.values()), default=data)) != size:
        raise CheckpointError(f"{path}: has {size} bytes, its header requires {expected}: truncated or corrupt")
    return tensors


def _entry(path: Path, name: str, values: Any, data: int) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = values["dtype"], tuple(values["shape"]), values["data_offsets"]
        if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
            raise ValueError("shape and data_offsets must be integers >= 0")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: corrupt header entry of tensor {name}: {error!r}") from error
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name} is {dtype}, supported are {', '.join(_ITEM_BYTES)}")
    expected, span = math.prod(shape) * _ITEM_BYTES[dtype], stop - start
    if expected != span:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} in {dtype} takes {expected} bytes, its offsets span {span}"
        )
    return TensorEntry(dtype, shape, data + start, data + stop)
