"""A file of packed weights: objects that hold tensors, which a later start maps instead of packing them again.

It knows no format of weights. Whatever consists of tensors, numbers, containers and classes of `kernels` can be kept:
pickle finds the tensors and leaves them to the file, which is laid out so:

    magic | tensors, each aligned to 64 bytes | index | size and digest of the index, magic

The index has place, shape and dtype of each tensor, a sum of each 16 MiB before it, and what pickle writes of the
objects. It comes last, so that a file that was not written to its end has none. The sums are checked before a tensor is
used: they take as long as reading memory, notice every single wrong bit and every lost page, and bring pages into
memory that the first step would wait for.
"""

import hashlib
import io
import json
import mmap
import os
import pickle
import struct
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from engine.model.weights import Progress
from kernels.dtypes import dtype_name

CHUNK_BYTES = 16 << 20
"""Bytes of a sum."""

_MAGIC = b"chairlift packed weights 1\n"
_TRAILER = struct.Struct(f"<Q32s{len(_MAGIC)}s")
_ALIGNMENT = 64  # as torch aligns tensors that it allocates
_PACKAGE = "kernels."


class DamagedFileError(Exception):
    """A file of packed weights is incomplete or was changed."""


def tensor_bytes(objects: Mapping[str, Any]) -> int:
    """Returns the bytes of all tensors of objects."""
    return sum(tensor.nbytes for tensor in _taken_apart(objects)[1])


def write_packed(file: BinaryIO, objects: Mapping[str, Any]) -> None:
    """Writes objects by their names to an empty file, and waits until they are on the disk.

    Raises: OSError: the disk is full, or fails.
    """
    pickled, tensors = _taken_apart(objects)
    entries = []
    file.write(_MAGIC)
    for tensor in tensors:
        _align(file)
        entries.append((file.tell(), list(tensor.shape), dtype_name(tensor.dtype)))
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    _align(file)
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        sums = [_sum_of(data, begin, end) for begin, end in _chunks(len(data))]
    header = json.dumps({"tensors": entries, "sums": sums}).encode()
    index = header + b"\n" + pickled
    file.write(index + _TRAILER.pack(len(index), hashlib.sha256(index).digest(), _MAGIC))
    file.flush()
    os.fsync(file.fileno())


def map_packed(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Returns the objects of a file. Their tensors are its pages: read-only, and shared by all processes.

    The file may be deleted meanwhile. Writing to it would change weights in use.

    Raises:
        DamagedFileError: it is incomplete or was changed; says how.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < _TRAILER.size:
            raise DamagedFileError("truncated")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    index_size, digest, magic = _TRAILER.unpack(data[-_TRAILER.size :])
    size = len(data) - _TRAILER.size - index_size
    if magic != _MAGIC or size < 0:
        raise DamagedFileError("truncated")
    index = data[size : size + index_size]
    if hashlib.sha256(index).digest() != digest:
        raise DamagedFileError("its index has changed")
    header, _, pickled = index.partition(b"\n")
    fields = json.loads(header)
    for (begin, end), expected in zip(_chunks(size), fields["sums"], strict=True):
        if end < size:
            data.madvise(mmap.MADV_WILLNEED, end, min(CHUNK_BYTES, size - end))
        if _sum_of(data, begin, end) != expected:
            raise DamagedFileError(f"bytes {begin} to {end} have changed")
        if progress is not None:
            progress(end, size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nor does anything write to it
        whole = torch.frombuffer(data, dtype=torch.uint8)
    return _put_together(pickled, [_tensor_in(whole, *entry) for entry in fields["tensors"]])


def _align(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _chunks(size: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + CHUNK_BYTES, size)) for begin in range(0, size, CHUNK_BYTES)]


def _sum_of(data: mmap.mmap, begin: int, end: int) -> int:
    """Returns the sum of the 64-bit words of a chunk, modulo 2^64."""
    return int(np.frombuffer(data, np.uint64, (end - begin) // 8, begin).sum(dtype=np.uint64))


def _tensor_in(whole: torch.Tensor, begin: int, shape: list[int], dtype_name: str) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    flat: torch.Tensor = whole[begin : begin + num_bytes].view(dtype)
    return flat.view(shape)


class _Pickler(pickle.Pickler):
    """Writes everything but tensors, which it collects, each once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """Returns the number of a tensor; None: it is something else."""
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]

    def reducer_override(self, value: Any) -> Any:
        """Writes a member of an enum as its class and value: early Python 3.11 would write a call of getattr."""
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented


class _Unpickler(pickle.Unpickler):
    """Makes objects of the classes of `kernels`, and of no others: a file is data, not code."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class by its name."""
        found = super().find_class(module, name) if module.startswith(_PACKAGE) else None
        if not isinstance(found, type):
            raise DamagedFileError(f"it names {module}.{name}, which is no class of the kernels")
        return found

    def persistent_load(self, number: Any) -> torch.Tensor:
        """Returns a tensor by its number."""
        return self._tensors[int(number)]


def _taken_apart(objects: Mapping[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(dict(objects))
    return file.getvalue(), pickler.tensors


def _put_together(pickled: bytes, tensors: list[torch.Tensor]) -> dict[str, Any]:
    objects: dict[str, Any] = _Unpickler(io.BytesIO(pickled), tensors).load()
    return objects
