"""Reads the files of a checkpoint folder, which are untrusted.

A file that is not regular, too large or too complex is rejected before it can block the start or fill the memory.
"""

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

MAX_JSON_BYTES = 16 << 20
"""Limit of files without a specific one. The largest shard index on the hub has 9 MB."""

MAX_TOKENIZER_BYTES = 128 << 20
"""Limit of tokenizer.json. The largest on the hub have 34 MB."""

MAX_NESTING = 100
"""Levels of nested lists and objects. Parsers in C and Rust fail from 128 on, each with its own error."""

MAX_ELEMENTS = 5_000_000
"""List elements and object members. A tokenizer of 262,000 tokens has 1.5 million; each may take 100 bytes."""

_LFS_POINTER = b"version https://git-lfs"
_MAX_POINTER_BYTES = 1024

_KINDS = {
    stat.S_ISDIR: "folder",
    stat.S_ISFIFO: "named pipe",
    stat.S_ISSOCK: "socket",
    stat.S_ISCHR: "device",
    stat.S_ISBLK: "device",
}


def exists(path: Path) -> bool:
    """Whether the path exists, including broken links, which raise an error when they are read.

    Raises: CheckpointError: its folder cannot be searched.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a null character is no part of a name
        return False
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return True


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file; never blocks, as opening a named pipe would.

    Raises:
        FileNotFoundError: the path does not exist.
        CheckpointError: it is not a regular file, cannot be opened, or is a pointer of Git LFS.
    """
    try:
        check_regular(path, path.stat())  # first: opening a device may have effects
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a link to {path.readlink()}, which does not exist") from None
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    file = os.fdopen(descriptor, "rb")
    try:
        status = os.fstat(descriptor)
        check_regular(path, status)
        if status.st_size <= _MAX_POINTER_BYTES and os.pread(descriptor, len(_LFS_POINTER), 0) == _LFS_POINTER:
            raise CheckpointError(f"{path}: is a pointer of Git LFS, not the file itself: run `git lfs pull` there")
    except BaseException:
        file.close()
        raise
    return file


def check_regular(path: Path, status: os.stat_result) -> None:
    """Checks that a status is a regular file's.

    Raises: CheckpointError: it is another kind of file.
    """
    for is_kind, name in _KINDS.items():
        if is_kind(status.st_mode):
            raise CheckpointError(f"{path}: is a {name}, expected a regular file")


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a file.

    Raises:
        FileNotFoundError: the path does not exist.
        CheckpointError: see `open_regular`, or the file is larger than max_bytes.
    """
    with open_regular(path) as file:
        return read_open_file(path, file, max_bytes)


def read_open_file(path: Path, file: BufferedReader, max_bytes: int) -> bytes:
    """Returns the content of an open file.

    Raises: CheckpointError: it cannot be read, or is larger than max_bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise CheckpointError(f"{path}: has {size} bytes, at most {max_bytes} are allowed for a file of this name")
    try:
        data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: has more than {max_bytes} bytes")
    return data


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Returns the JSON value in a file.

    Raises:
        FileNotFoundError: the path does not exist.
        CheckpointError: see `read_bytes` and `parse_json`.
    """
    return parse_json(str(path), read_bytes(path, max_bytes))


def parse_json(source: str, data: bytes) -> Any:
    """Parses JSON.

    Args:
        source: origin of the data, for errors.
        data: the text, in UTF-8.

    Raises:
        CheckpointError: the data is not JSON in UTF-8, is nested too deeply, or has too many elements.
    """
    # An upper bound: counts commas and brackets, also those inside strings.
    num_elements = data.count(b",") + data.count(b"[") + data.count(b"{")
    if num_elements > MAX_ELEMENTS:
        raise CheckpointError(f"{source}: has up to {num_elements} elements of JSON, at most {MAX_ELEMENTS} are read")
    try:
        value = json.loads(data.decode())
    except RecursionError:
        raise CheckpointError(f"{source}: is nested more than {MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise CheckpointError(f"{source}: cannot be read as JSON: {error}; fetch the file again") from error
    level, depth = [value], 0
    while level := [item for node in level for item in _items(node) if isinstance(item, dict | list)]:
        depth += 1
        if depth >= MAX_NESTING:
            raise CheckpointError(f"{source}: is nested more than {MAX_NESTING} levels deep")
    return value


def _items(node: Any) -> Any:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()
