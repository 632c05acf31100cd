"""Keeps packed weights on the disk, so that the next start with the same model maps them instead of packing them again.

A file holds the weights of one model in one form and is named by a hash of both. It is written whole, on a thread while
the engine already serves, and never changed. Any number of engines may use a folder, and it may be deleted at any time:
an engine keeps the pages that it has mapped. A file that is damaged, a disk that is full and a folder that cannot be
used cause one warning, and the weights are packed.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import CheckpointError
from engine.model.packed_file import DamagedFileError, map_packed, tensor_bytes, write_packed
from engine.model.weights import Progress

FOLDER = "chairlift-packed"
"""Name of the folder in that of the flag, which may hold other things and have other permissions."""
SUFFIX = ".packed"
_TEMPORARY = ".tmp"

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class _UnusableError(Exception):
    """The folder cannot be used for these weights; says why."""


class PackedWeights:
    """The packed weights of one start: those of a file, or new ones that `save` writes to it.

    Attributes:
        is_stored: whether they are those of a file.
    """

    def __init__(self, cache: "PackedCache", key: str, stored: dict[str, Any] | None) -> None:
        self._cache, self._key, self._stored = cache, key, stored
        self._new: dict[str, Any] = {}
        self.is_stored = stored is not None

    def __call__(self, name: str, pack: Callable[[], _T]) -> _T:
        """Implements `Recall`."""
        if self._stored is not None:
            packed: _T = self._stored[name]
            return packed
        packed = self._new[name] = pack()
        return packed

    def save(self) -> threading.Thread | None:
        """Starts to write new weights, which nothing may change any more; returns the thread, None if there are none.

        The process does not wait for it at its end: what is written by then is removed at another start.
        """
        if not self._new:
            return None
        new, self._new = self._new, {}
        thread = threading.Thread(target=self._cache.save, args=(self._key, new), name="packed-cache", daemon=True)
        thread.start()
        return thread


class PackedCache:
    """The folder of all files.

    Attributes:
        key: returns everything that the weights of this start depend on.
    """

    def __init__(self, folder: Path, max_bytes: int, key: Callable[[], str]) -> None:
        """Opens no file yet.

        Args:
            folder: the folder, in which FOLDER is made, for this user only.
            max_bytes: size of all files, for which those used least recently are deleted.
            key: see `PackedCache`. It is called again before weights are saved, in case the model was changed while it
                was read.
        """
        self._folder = folder / FOLDER
        self._max_bytes = max_bytes
        self.key = key

    def open(self, progress: Progress | None = None) -> PackedWeights:
        """Returns the weights of the file, checked, if there is one; otherwise those that are to be packed.

        progress, if given, is called with the bytes that are checked, and their total.
        """
        key = self.key()
        path = self._path(key)
        stored = None
        try:
            if path.exists():
                _check_owner(self._folder)
                stored = map_packed(path, progress)
                os.utime(path)  # used last
                _log.info("Packed weights are those of an earlier start, in %s", path)
        except DamagedFileError as error:
            _log.warning("%s is damaged (%s): the weights are packed again", path, error)
        except (OSError, _UnusableError) as error:
            _warn(path, error)
        return PackedWeights(self, key, stored)

    def save(self, key: str, objects: dict[str, Any]) -> None:
        """Writes packed weights, as `PackedWeights.save` does, on this thread."""
        num_bytes = tensor_bytes(objects)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self._folder)
            self._make_room(num_bytes)
            with self._whole_file(self._path(key)) as file:
                write_packed(file, objects)
                if self.key() != key:
                    raise _UnusableError("the model was changed while it was read")
        except (OSError, CheckpointError, _UnusableError) as error:
            _warn(self._folder, error)
            return
        _log.info("Packed weights are saved for the next start: %.2f GB in %s", num_bytes / 1e9, self._path(key))

    def _path(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}{SUFFIX}"

    @contextlib.contextmanager
    def _whole_file(self, path: Path) -> Iterator[Any]:
        """Opens a temporary file, locked, that gets its name at the end of the context, or is deleted by an error."""
        with tempfile.NamedTemporaryFile("w+b", dir=self._folder, suffix=_TEMPORARY, delete=False) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _make_room(self, num_bytes: int) -> None:
        """Deletes files that their process has left unfinished, and those used least recently.

        Raises: _UnusableError: the limit or the disk has too little room.
        """
        if num_bytes > self._max_bytes:
            raise _UnusableError(f"they take {num_bytes} bytes, --packed-cache-bytes is {self._max_bytes}")
        for path in self._folder.glob(f"*{_TEMPORARY}"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        files = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process deletes too
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = num_bytes + sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
        free_bytes = shutil.disk_usage(self._folder).free
        if num_bytes > free_bytes:
            raise _UnusableError(f"they take {num_bytes} bytes, {free_bytes} are free")


def _check_owner(folder: Path) -> None:
    """Checks that only this user can write to a folder.

    Raises: _UnusableError: others can.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise _UnusableError("other users can write to it, remove it")


def _warn(path: Path, error: Exception) -> None:
    reason = error.strerror if isinstance(error, OSError) else error
    _log.warning("packed weights are not cached, %s: %s", path, reason)
