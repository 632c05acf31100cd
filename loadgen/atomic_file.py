"""Writes files atomically: a file is complete, or it does not exist."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from loadgen.errors import ResultError


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing under a temporary name; it is renamed when the block succeeds, and removed otherwise."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Creates the folder; inside the block, errors of the file system become a ResultError.

    Raises: ResultError: the disk is full, or the folder cannot be made or written; names it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ResultError(
            f"{folder}: results cannot be written: {error.strerror or error}; make room or name another folder"
        ) from error
