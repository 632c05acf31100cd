"""Keeps compiled kernels in Triton's cache, or in a temporary folder if that is not writable.

Triton compiles through files, so a full disk would end the process. With this module it causes a warning, and the next
start recompiles what could not be kept.
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
    """Neither the cache nor the temporary folder is writable."""

    def __init__(self, error: OSError) -> None:
        """Composes the message, which says what to do."""
        super().__init__(
            f"GPU kernels cannot be compiled: {error.strerror}; make room in {os.environ.get('TMPDIR') or '/tmp'}, or "
            "name another folder with TMPDIR"
        )


class KernelCache(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Files of one kernel, written atomically: the next start finds all of it, or nothing."""

    cache_dir: str | None
    lock_path: str | None

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        # override and dump are debugging aids for kernel developers, who should see the error
        self._is_kept = not (override or dump)
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError as error:
            if not self._is_kept:
                raise
            self._move(error)

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        """Writes a file and returns its path.

        Raises: OSError: neither the cache nor the temporary folder is writable.
        """
        try:
            return str(super().put(data, filename, binary=binary))
        except OSError as error:
            if not self._is_kept:
                raise
            self._move(error)
            return str(super().put(data, filename, binary=binary))

    def _move(self, error: OSError) -> None:
        """Switches to the temporary folder."""
        root = triton.knobs.cache.dir
        _warn_uncached(f"{root}: {error.strerror}")
        if self.cache_dir:
            for leftover in Path(self.cache_dir).glob(f"tmp.pid_{os.getpid()}_*"):
                shutil.rmtree(leftover, ignore_errors=True)
        folder = _temporary_folder() / self.key
        folder.mkdir(exist_ok=True)
        self.cache_dir, self.lock_path = str(folder), str(folder / "lock")


def use_kernel_cache() -> None:
    """Makes Triton use this cache, unless TRITON_CACHE_MANAGER is set."""
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
