"""Where compiled kernels are kept: in Triton's own cache, and in a temporary folder if that cannot be written.

Triton compiles by way of files, so a full disk would end the process. It costs a warning instead, and time: the next
start compiles again what could not be kept.
"""

import atexit
import functools
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path

import triton
from triton.runtime.cache import FileCacheManager

_log = logging.getLogger(__name__)
_lock = threading.Lock()


class NoRoomError(Exception):
    """A compile's files can be written nowhere."""

    def __init__(self, error: OSError) -> None:
        """Says what to do."""
        super().__init__(
            f"GPU kernels cannot be compiled: {error.strerror}; make room in {os.environ.get('TMPDIR') or '/tmp'}, or "
            "name another folder with TMPDIR"
        )


class KernelCache(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Files of one kernel: what the next start finds of it is whole, or nothing."""

    cache_dir: str | None
    lock_path: str | None

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._is_kept = not (override or dump)  # those two are for people at work on kernels, who shall hear of it
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError as error:
            if not self._is_kept:
                raise
            self._move(error)

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        """Writes a file and returns its path.

        Raises: OSError: it can be written neither where it should be nor in the temporary folder.
        """
        try:
            return str(super().put(data, filename, binary=binary))
        except OSError as error:
            if not self._is_kept:
                raise
            self._move(error)
            return str(super().put(data, filename, binary=binary))

    def _move(self, error: OSError) -> None:
        """From here on, into the temporary folder."""
        root = triton.knobs.cache.dir
        _warn_uncached(f"{root}: {error.strerror}")
        if self.cache_dir:
            for leftover in Path(self.cache_dir).glob(f"tmp.pid_{os.getpid()}_*"):
                shutil.rmtree(leftover, ignore_errors=True)
        folder = _temporary_folder() / self.key
        folder.mkdir(exist_ok=True)
        self.cache_dir, self.lock_path = str(folder), str(folder / "lock")


def use_kernel_cache() -> None:
    """Makes Triton keep its files so, unless it has been told otherwise (TRITON_CACHE_MANAGER)."""
    if triton.knobs.cache.manager_class is None:
        triton.knobs.cache.manager_class = KernelCache


@functools.cache  # once per cause and process
def _warn_uncached(reason: str) -> None:
    _log.warning(
        "GPU kernels are not cached, every start compiles them again: %s; TRITON_CACHE_DIR names another folder", reason
    )


def _temporary_folder() -> Path:
    with _lock:  # kernels are compiled on several threads
        return _make_temporary_folder()


@functools.cache
def _make_temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="chairlift-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
