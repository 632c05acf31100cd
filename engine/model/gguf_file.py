"""Reads and checks the header of a GGUF file, llama.cpp's format of checkpoints, before any of its data is used.

The format (ggml's docs/gguf.md), versions 2 and 3, little-endian: "GGUF", version u32, number of tensors u64, number of
metadata values u64; each value: key, type u32, value; each tensor: name, number of dimensions u32, dimensions u64 (the
innermost first), type u32, offset u64; padding to `general.alignment`; then the data, to which offsets are relative. A
string is a length u64 and UTF-8; an array is a type u32, a count u64 and its items.
"""

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from engine.errors import CheckpointError
from engine.model.checkpoint_file import open_regular
from engine.model.config_fields import ConfigFields
from engine.model.tensor_entry import TensorEntry

MAX_HEADER_BYTES = 256 << 20
"""The largest on the hub have 20 MB: the tokens of a vocabulary and the merges."""

MAX_ITEMS = 1 << 22
"""Of an array that is used; the largest on the hub are 600,000 merges."""

MAX_METADATA = 65_536
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 65_535
_MAX_DIMENSIONS = 4
_READ_BYTES = 16 << 20


class BlockType(NamedTuple):
    """How a type stores numbers: in blocks of a fixed size along the inputs of a matrix.

    Attributes:
        numbers, num_bytes: of a block.
        num_bits: of an integer when it is unpacked, 4, 5, 6 or 8; 0: a number, or blocks of something else.
        group_size: numbers that share a scale.
    """

    name: str
    numbers: int
    num_bytes: int
    num_bits: int = 0
    group_size: int = 0


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, 4, 32),
    3: BlockType("Q4_1", 32, 20, 4, 32),
    6: BlockType("Q5_0", 32, 22, 5, 32),
    7: BlockType("Q5_1", 32, 24, 5, 32),
    8: BlockType("Q8_0", 32, 34, 8, 32),
    10: BlockType("Q2_K", 256, 84, 4, 16),
    11: BlockType("Q3_K", 256, 110, 4, 16),
    12: BlockType("Q4_K", 256, 144, 4, 32),
    13: BlockType("Q5_K", 256, 176, 5, 32),
    14: BlockType("Q6_K", 256, 210, 6, 16),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18, 8, 32),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136, 8, 32),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17, 8, 32),
}
"""The types that are read, by their numbers in a file."""

QUANTIZED_TYPES = {kind.name: kind for kind in TYPES.values() if kind.num_bits}
"""Those in blocks of integers, by name."""

REQUANTIZED_TYPES = {kind.name: kind for kind in TYPES.values() if kind.numbers > 1 and not kind.num_bits}
"""Those in other blocks, which `engine.model.gguf_requantization` converts to Q8_0, by name."""

LOADED_TYPES = {**QUANTIZED_TYPES, **dict.fromkeys(REQUANTIZED_TYPES, QUANTIZED_TYPES["Q8_0"])}
"""The type in which blocks are loaded, by the name of theirs in the file."""

_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}.items()
}
_F32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_FLOATS = {_F32, 12}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_BOOL_ITEM = struct.Struct("<?")


@dataclass(frozen=True, slots=True, repr=False)
class GgufArray:
    """An array of the metadata, which methods of `GgufHeader` read.

    Attributes:
        kind: number of the type of its items.
        count: how many there are.
        start: where they begin in the file.
    """

    kind: int
    count: int
    start: int

    def __repr__(self) -> str:
        return f"an array of {self.count} values"


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file.

    Attributes:
        path: the file.
        metadata: its values by key, arrays as `GgufArray`.
        tensors: by name; shapes begin with the outermost dimension, as in other formats.
        raw: the bytes before the data.
    """

    path: Path
    metadata: ConfigFields
    tensors: dict[str, TensorEntry]
    raw: bytes

    def strings(self, key: str) -> list[str]:
        """Returns an array of strings.

        Raises: CheckpointError: it is missing, holds something else, or is not UTF-8.
        """
        array = self._array(key)
        if array.kind != _STRING:
            raise self.metadata.error(key, f"is {array!r} of another type, expected strings")
        texts, position = [], array.start
        for index in range(array.count):
            start = position + _U64.size
            position = start + _U64.unpack_from(self.raw, position)[0]
            try:
                texts.append(self.raw[start:position].decode())
            except UnicodeDecodeError as error:
                raise self.metadata.error(key, f"is not UTF-8 at index {index}: {error.reason}") from None
        return texts

    def integers(self, key: str) -> list[int]:
        """Returns an array of integers.

        Raises: CheckpointError: it is missing, or holds something else.
        """
        return list(self._numbers(key, "integers", {*_SCALARS} - _FLOATS))

    def numbers(self, key: str) -> list[float]:
        """Returns an array of numbers; they may be NaN or infinite.

        Raises: CheckpointError: it is missing, or holds something else.
        """
        return list(self._numbers(key, "numbers", {*_SCALARS}))

    def flags(self, key: str) -> list[bool]:
        """Returns an array of booleans.

        Raises: CheckpointError: it is missing, or holds something else.
        """
        return list(self._numbers(key, "booleans", {_BOOL}))

    def _numbers(self, key: str, expected: str, kinds: set[int]) -> Iterator[Any]:
        array = self._array(key)
        if array.kind not in kinds:
            raise self.metadata.error(key, f"is {array!r} of another type, expected {expected}")
        item = _BOOL_ITEM if array.kind == _BOOL else _SCALARS[array.kind]
        return (value for (value,) in item.iter_unpack(self.raw[array.start : array.start + array.count * item.size]))

    def _array(self, key: str) -> GgufArray:
        array = self.metadata.raw(key)
        if not isinstance(array, GgufArray):
            raise self.metadata.error(key, f"is {array!r}, expected an array")
        if array.count > MAX_ITEMS:
            raise self.metadata.error(key, f"is {array!r}, the maximum is {MAX_ITEMS}")
        return array


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the header of a file, and checks all counts, lengths and offsets against its size.

    Raises: CheckpointError: the file cannot be read, is truncated or corrupt, or has types that are not supported.
    """
    try:
        with open_regular(path) as file:
            return _read(path, _Bytes(path, file))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


class _Bytes:
    """The beginning of a file, of which more is read when it is needed; `position` moves forward."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.data = b""
        self.position = 0

    def require(self, stop: int, what: str) -> None:
        """Reads on until there are `stop` bytes.

        Raises: CheckpointError: the file, or what is read of it, is shorter.
        """
        if stop <= len(self.data):
            return
        if stop > self.size:
            raise CheckpointError(
                f"{self._path}: {what} ends at byte {stop}, the file has {self.size} bytes: truncated or corrupt"
            )
        if stop > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self._path}: {what} ends at byte {stop}, at most {MAX_HEADER_BYTES} bytes are read before the data"
            )
        self.data += self._file.read(min(max(_READ_BYTES, stop - len(self.data)), self.size - len(self.data)))
        if stop > len(self.data):
            raise CheckpointError(f"{self._path}: has become shorter while it was read")

    def number(self, item: struct.Struct, what: str) -> Any:
        """Returns the next number."""
        self.require(self.position + item.size, what)
        (value,) = item.unpack_from(self.data, self.position)
        self.position += item.size
        return value

    def count(self, item: struct.Struct, maximum: int, what: str) -> int:
        """Returns the next number, at most `maximum`."""
        value: int = self.number(item, what)
        if value > maximum:
            raise CheckpointError(f"{self._path}: {what} is {value}, the maximum is {maximum}: corrupt")
        return value

    def text(self, maximum: int, what: str) -> str:
        """Returns the next string, of at most `maximum` bytes."""
        length = self.count(_U64, maximum, f"the length of {what}")
        start, stop = self.position, self.position + length
        self.require(stop, what)
        self.position = stop
        try:
            return self.data[start:stop].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {what} is not UTF-8: {error.reason}") from None

    def skip_strings(self, count: int, what: str) -> None:
        """Moves behind strings."""
        position, length = self.position, _U64.unpack_from
        for _ in range(count):
            if position + _U64.size > len(self.data):
                self.require(position + _U64.size, what)
            position += _U64.size + length(self.data, position)[0]
        self.require(position, what)
        self.position = position


def _read(path: Path, data: _Bytes) -> GgufHeader:
    data.require(4, "the magic number")
    if data.data[:4] != b"GGUF":
        raise CheckpointError(f"{path}: is no GGUF file: it does not begin with GGUF")
    data.position = 4
    version = data.number(_U32, "the version")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: version of the format is {version}, supported are 2 and 3, little-endian")
    num_tensors = data.count(_U64, MAX_TENSORS, "the number of tensors")
    num_metadata = data.count(_U64, MAX_METADATA, "the number of metadata values")
    values: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = data.text(MAX_NAME_BYTES, "a metadata key")
        if key in values:
            raise CheckpointError(f"{path}: metadata key {key[:200]!r} is there twice")
        values[key] = _value(path, data, key[:200])
    metadata = ConfigFields(str(path), values)
    tensors: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = data.text(MAX_NAME_BYTES, "the name of a tensor")
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name[:200]} is there twice")
        tensors[name] = _tensor(path, data, name[:200])
    alignment = metadata.integer("general.alignment", 32, maximum=1 << 16)
    start = -(-data.position // alignment) * alignment
    entries = {name: _entry(path, name, *tensor, start, data.size) for name, tensor in tensors.items()}
    return GgufHeader(path, metadata, entries, data.data[: data.position])


def _value(path: Path, data: _Bytes, key: str) -> Any:
    kind = data.number(_U32, f"the type of {key}")
    if kind in _SCALARS:
        value = data.number(_SCALARS[kind], key)
        return _decimal(value) if kind == _F32 else value
    if kind == _BOOL:
        return data.count(_SCALARS[0], 1, key) == 1
    if kind == _STRING:
        return data.text(MAX_HEADER_BYTES, key)
    if kind != _ARRAY:
        raise CheckpointError(f"{path}: {key} has the type {kind}, expected 0 to 12: corrupt")
    item = data.number(_U32, f"the type of items of {key}")
    count = data.count(_U64, MAX_HEADER_BYTES, f"the number of items of {key}")
    array = GgufArray(item, count, data.position)
    if item == _STRING:
        data.skip_strings(count, key)
    elif item in _SCALARS or item == _BOOL:
        stop = data.position + count * (1 if item == _BOOL else _SCALARS[item].size)
        data.require(stop, key)
        data.position = stop
    else:
        raise CheckpointError(f"{path}: {key} has items of the type {item}, supported are numbers and strings")
    return array


def _decimal(value: float) -> float:
    """Returns the shortest decimal that is a float32: the number that config.json had, such as 1e-5."""
    shortened = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((short for short in shortened if _rounded(short) == value), value)


def _rounded(value: float) -> float:
    try:
        return float(_SCALARS[_F32].unpack(_SCALARS[_F32].pack(value))[0])
    except OverflowError:
        return math.inf


def _tensor(path: Path, data: _Bytes, name: str) -> tuple[BlockType, tuple[int, ...], int]:
    """Returns type, shape and offset of the next tensor."""
    num_dims = data.count(_U32, _MAX_DIMENSIONS, f"the number of dimensions of tensor {name}")
    sizes = [data.number(_U64, f"the shape of tensor {name}") for _ in range(num_dims)]
    number = data.number(_U32, f"the type of tensor {name}")
    kind = TYPES.get(number)
    if kind is None:
        raise CheckpointError(
            f"{path}: tensor {name} is of type {number}, supported are "
            f"{', '.join(f'{kind.name} ({number})' for number, kind in TYPES.items())}"
        )
    if not sizes or 0 in sizes or sizes[0] % kind.numbers:
        raise CheckpointError(
            f"{path}: tensor {name} has the dimensions {sizes}, expected numbers > 0, and in {kind.name} a first one "
            f"that is a multiple of {kind.numbers}"
        )
    return kind, tuple(reversed(sizes)), data.number(_U64, f"the offset of tensor {name}")


def _entry(
    path: Path, name: str, kind: BlockType, shape: tuple[int, ...], offset: int, data: int, size: int
) -> TensorEntry:
    start = data + offset
    stop = start + math.prod(shape) // kind.numbers * kind.num_bytes
    if stop > size:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} in {kind.name} at offset {offset} ends at byte {stop}, the "
            f"file has {size} bytes: truncated or corrupt"
        )
    return TensorEntry(kind.name, shape, start, stop)
