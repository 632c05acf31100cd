"""Keeps compiled CPU kernels on the disk, found by everything that their code depends on.

A file is named by a hash of the sources of the kernels, the packages that compile them, the processor that they are
for, and the types of their arguments. Neither times nor paths count: kernels survive a rebuilt image, a moved checkout
and a second one. Any number of processes may use a folder, because files are written whole and never changed. The
folder may be deleted at any time. numba's own cache notices only changes of a kernel's own file, although kernels call
each other across files.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import inspect
import logging
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numba
from numba.core import compiler, serialize

SUFFIX = ".kernel"
MAX_BYTES = 256 << 20
"""Size of the folder from which a start that compiles deletes the files least recently used. A start uses 10 MB."""

MARKER = "complete-"
"""Begins the names of files that say that a folder has all kernels for a processor."""

COMPILED = Path(__file__).parent / "compiled" / "chairlift"
"""Folder of kernels that an image carries for levels of x86-64 (`compile_ahead`); it is only read."""

_DIGEST_BYTES = 32
_TEMPORARY = ".tmp"
_WRITE_S = 3600.0  # longer than any process writes a file
_COMPILE_S = 600  # longer than processes take for all kernels, on a slow machine too
_POLL_S = 0.1
_PACKAGES = ("llvmlite", "numba", "numpy")
_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK")
"""Of numba, from the variables of its environment that change the code of kernels."""

_SOURCES = Path(__file__).parents[1]
_config: Any = numba.config  # its attributes are made at run time
_dumps: Any = serialize.dumps
_rebuild: Any = compiler.CompileResult._rebuild
_log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """Returns the folder of compiled kernels, which may not exist yet; None if there is no home folder to have it in.

    It is `chairlift` in NUMBA_CACHE_DIR, or else `chairlift/kernels` in the user's cache (XDG_CACHE_HOME, ~/.cache).
    """
    if _config.CACHE_DIR:
        return Path(_config.CACHE_DIR) / "chairlift"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift" / "kernels"
    except RuntimeError:
        return None


def digest_of(sources: Iterable[Path], packages: Iterable[str] = _PACKAGES) -> str:
    """Returns a hash of files' contents and of the versions of packages and Python: 64 hex digits."""
    versions = [platform.python_version(), *(f"{name} {importlib.metadata.version(name)}" for name in packages)]
    digest = hashlib.sha256("\n".join(versions).encode())
    for source in sorted(sources):
        content = source.read_bytes()
        digest.update(f"\n{source.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def kernel_sources() -> list[Path]:
    """Returns the files that compiled kernels may take code and constants from."""
    return [*_SOURCES.glob("*.py"), *_SOURCES.glob("cpu/*.py")]


def environment_digest(cpu: str, features: str) -> str:
    """Returns a hash of all that the kernels for a processor depend on: 16 hex digits."""
    return hashlib.sha256(f"{_environment()} {cpu} {features}".encode()).hexdigest()[:16]


@functools.cache
def _environment() -> str:
    settings = [getattr(_config, name) for name in _SETTINGS]
    return f"{digest_of(kernel_sources())} {settings}"


@functools.cache
def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class KernelCache:
    """The files of one kernel, one for each processor and each signature that it is compiled for.

    Takes the place of numba's cache (`numba.core.caching`), whose methods it has. A damaged file, or a disk that is
    full or cannot be written, causes one warning in a process; the kernel is then compiled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        code = function.__code__
        self._name = function.__name__
        self._function_key = (
            _environment(),
            _file_digest(inspect.getfile(function)),
            *(function.__qualname__, str(code.co_firstlineno), code.co_code.hex()),
            _dumps(tuple(cell.cell_contents for cell in function.__closure__ or ())).hex(),
        )

    @property
    def cache_path(self) -> str | None:
        """The folder."""
        folder = cache_folder()
        return None if folder is None else str(folder)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Returns the kernel for a signature; None if it is not cached or cannot be read."""
        target_context.refresh()
        name = self._file_name(signature, target_context.codegen())
        if (data := _find(name)) is None and _compile_missing:
            compile_all = _compile_missing.pop()
            with _alone() as is_writable:
                if is_writable and (data := _find(name)) is None:
                    compile_all()
                    data = _find(name)
        return None if data is None else _rebuild(target_context, *pickle.loads(data))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Saves a compiled kernel for the next start, if possible."""
        if compiled.library.has_dynamic_globals or not all(loop.can_cache for loop in compiled.lifted):
            return  # its code holds addresses of this process
        folder = cache_folder()
        if folder is None:
            _warn_uncached("there is no home folder")
            return
        data = _dumps(compiled._reduce())
        path = folder / self._file_name(signature, compiled.codegen)
        try:
            _prune(folder)
            _write(path, hashlib.sha256(data).digest() + data)
        except OSError as error:
            _warn_uncached(f"{folder}: {error.strerror}")  # which names no file: one line for all

    def enable(self) -> None:
        """Does nothing: it is always enabled."""

    def disable(self) -> None:
        """Does nothing."""

    def flush(self) -> None:
        """Does nothing: what the key names never changes."""

    def _file_name(self, signature: Any, codegen: Any) -> str:
        key = "\n".join([*self._function_key, str(signature), *map(str, codegen.magic_tuple())])
        return f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:40]}{SUFFIX}"


_compile_missing: list[Callable[[], None]] = []


@contextlib.contextmanager
def compiling_missing(compile_all: Callable[[], None]) -> Iterator[None]:
    """Within the context, the first kernel that is not on the disk causes a call, which may bring it there.

    Of several processes one makes the call, and the others wait for it.
    """
    _compile_missing.append(compile_all)
    try:
        yield
    finally:
        _compile_missing.clear()


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Keeps other processes out of the context; yields False, without waiting, if the folder cannot be written.

    Two may be in it where files cannot be locked, or if one takes too long: each writes whole files.
    """
    folder = cache_folder()
    try:
        if folder is None:
            raise FileNotFoundError
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / "compiling.lock").open("a")
    except OSError:
        yield False
        return
    with lock:
        _wait_for(lock, folder)
        yield True


def _wait_for(lock: IO[str], folder: Path) -> None:
    """Locks a file, but does not wait for a process without end: it may be stopped, or hang."""
    for attempt in range(int(_COMPILE_S / _POLL_S)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == 0:
                _log.info("waiting for another process, which compiles CPU kernels into %s", folder)
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks
            return
    _log.warning("another process has not compiled the CPU kernels in %d s: compiling them too", _COMPILE_S)


def _find(name: str) -> bytes | None:
    for folder in (COMPILED, cache_folder()):  # what an image carries needs no cache, which may not be readable
        if folder is not None and (data := _read(folder / name)) is not None:
            return data
    return None


def _read(path: Path) -> bytes | None:
    """Returns what a file holds behind its digest; None: there is none, or it cannot be used."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_uncached(f"{path.parent}: {error.strerror}")
        return None
    if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
        _warn_damaged(path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used last
    return data[_DIGEST_BYTES:]


def _write(path: Path, data: bytes) -> None:
    """Writes a file as a whole, or not at all.

    Raises: OSError: the folder cannot be written, or is full.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=_TEMPORARY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


@functools.cache  # once per folder and process, before its first file
def _prune(folder: Path) -> None:
    """Deletes the files least recently used while all together have more than `MAX_BYTES`.

    Also deletes what processes left that were killed while they wrote.
    """
    for path in folder.glob(f"*{_TEMPORARY}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _WRITE_S:
                path.unlink()
    files = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another process deletes too
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    num_bytes = sum(size for _, size, _ in files)
    if num_bytes > MAX_BYTES:  # the folder does not hold all kernels of a processor any more
        for marker in folder.glob(f"{MARKER}*"):
            with contextlib.suppress(OSError):
                marker.unlink()
    for _, size, path in sorted(files):
        if num_bytes <= MAX_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        num_bytes -= size


@functools.cache  # once per cause and process
def _warn_uncached(reason: str) -> None:
    _log.warning(
        "CPU kernels are not cached, every start compiles them again: %s; NUMBA_CACHE_DIR names another folder", reason
    )


_damaged_folders: set[Path] = set()


def _warn_damaged(path: Path) -> None:
    """Warns once per folder and process."""
    if path.parent not in _damaged_folders:
        _damaged_folders.add(path.parent)
        _log.warning("recompiling CPU kernels whose files are damaged, the first is %s", path)
