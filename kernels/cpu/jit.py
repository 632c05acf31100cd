"""Compiles the CPU kernels and caches them on disk.

Every kernel is cached on disk and releases the GIL. Divisions by zero follow IEEE 754, because a check would keep loops
from being vectorised. numba's cache only notices changes of a kernel's own file, but kernels call each other across
files: on import, cache entries older than the newest file of this folder are deleted.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import event
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""Allows vectorised sums. `nnan` and `ninf` are left out: a row with a NaN must stay NaN to be reported as failed."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OnCompiled = Callable[[int, int], None]

_log = logging.getLogger(__name__)

_kernels: list[Any] = []  # all of this process; an engine uses every one of them


class _Cache(FunctionCache):
    """numba's cache, except that a failing or damaged disk causes a warning and a recompile, not an exception."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns None if the kernel is not cached or cannot be read."""
        try:
            return cast(Any, super()).load_overload(sig, target_context)
        except OSError as error:
            self._warn(error)
        except Exception as error:  # unpickling a file that was cut off may raise anything
            _log.warning("recompiling a CPU kernel: its cache file is damaged: %r, %r", self, error)
            with contextlib.suppress(OSError):
                cast(Any, self).flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves a kernel for the next start, if possible."""
        try:
            cast(Any, super()).save_overload(sig, data)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        _warn_uncached(f"{Path(self.cache_path).parent}: {error.strerror}")  # which names no file: one line for all


@functools.cache  # once per cause and process
def _warn_uncached(reason: str) -> None:
    _log.warning("CPU kernels are not cached, every start compiles them again: %s", reason)


@functools.cache  # once per folder and process
def _drop_stale_cache(sources: Path, cache: Path) -> None:
    """Deletes stale entries. Safe beside other processes: numba recompiles an entry that disappears."""
    newest_s = max(source.stat().st_mtime for source in sources.glob("*.py"))
    for entry in cache.glob("*.nb[ic]"):
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime < newest_s:
                entry.unlink()


def _compile(function: _Function, *, fastmath: set[str] | bool, parallel: bool = False) -> _Function:
    try:
        jitted: Any = njit(cache=True, nogil=True, error_model="numpy", fastmath=fastmath, parallel=parallel)(function)
        _drop_stale_cache(Path(__file__).parent, Path(jitted.stats.cache_path))
        jitted._cache = cast(Any, _Cache)(function)
    except RuntimeError:  # no folder to cache in, neither beside the source nor in the user's home: compile every time
        _warn_uncached("no cache folder is writable; set NUMBA_CACHE_DIR")
        jitted = njit(nogil=True, error_model="numpy", fastmath=fastmath, parallel=parallel)(function)
    _kernels.append(jitted)
    return cast(_Function, jitted)


def cache_folder() -> Path | None:
    """Returns the folder in which kernels are cached; None if they are not."""
    paths = (kernel.stats.cache_path for kernel in _kernels)
    return next((Path(path) for path in paths if path), None)


@contextlib.contextmanager
def watch_compiles(on_compiled: _OnCompiled) -> Iterator[None]:
    """Calls on_compiled(kernels compiled, kernels in total) after each compile inside the block.

    Kernels loaded from the disk do not count. The call is made on the compiling thread.
    """
    listener = _Listener(on_compiled)
    events: Any = event
    events.register(_COMPILE, listener)
    try:
        yield
    finally:
        events.unregister(_COMPILE, listener)


_COMPILE = "numba:compile"


class _Listener(event.Listener):
    def __init__(self, on_compiled: _OnCompiled) -> None:
        self._on_compiled = on_compiled
        self._compiled: set[int] = set()
        self._known = {id(kernel) for kernel in _kernels}

    def on_start(self, event: Any) -> None:
        """Does nothing."""

    def on_end(self, event: Any) -> None:
        """Counts a kernel at its first compile; parts of kernels and recompiles for other types do not count."""
        kernel = id(event.data["dispatcher"])
        if kernel in self._known and kernel not in self._compiled:
            self._compiled.add(kernel)
            self._on_compiled(len(self._compiled), len(self._known))


def kernel(function: _Function) -> _Function:
    """Compiles a kernel for one thread."""
    return _compile(function, fastmath=FASTMATH)


def inline(function: _Function) -> _Function:
    """Compiles a function that is inlined into the kernels that call it.

    It is not cached by itself: numba caches object code, which can be called but not inlined, so a kernel compiled
    around a cached function would be slow.
    """
    return cast(_Function, njit(nogil=True, error_model="numpy", fastmath=FASTMATH)(function))


def compile_now(function: Callable[..., Any], signature: str) -> None:
    """Compiles a kernel, or loads it from the disk, for arguments of these types (numba's names)."""
    cast(Any, function).compile(f"({signature},)")


def strict_kernel(function: _Function) -> _Function:
    """Compiles a kernel whose floating-point operations are done as written.

    `fastmath` must be explicit: without it numba inherits the flag of the caller that is being compiled.
    """
    return _compile(function, fastmath=False)


def strict_parallel_kernel(function: _Function) -> _Function:
    """A `strict_kernel` whose `prange` loops run on all threads."""
    return _compile(function, fastmath=False, parallel=True)


def strict_inline(function: _Function) -> _Function:
    """Compiles a strict function into the body of each strict caller, so that a loop over it can be vectorised."""
    return cast(_Function, njit(inline="always", error_model="numpy", fastmath=False)(function))


def _bits_to_float(_typing_context: Any, _bits: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


def _float_to_bits(_typing_context: Any, _value: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


bits_float: Any = intrinsic(_bits_to_float)
"""The fp32 value of 32 bits."""
float_bits: Any = intrinsic(_float_to_bits)
"""The 32 bits of an fp32 value, as an int32."""


# Not in the caller's fastmath, as `inline="always"` would be: `reassoc` cancels the two uses of round_to_integer.
@njit(nogil=True, error_model="numpy", fastmath=False)
def exp_nonpositive(x: np.float32) -> np.float32:
    """exp(x) for fp32 x <= 0, relative error 1e-7; 0 below -87, NaN stays NaN. Unlike math.exp it vectorises.

    Method: Cephes expf: x = n ln 2 + r, a polynomial in r, n into the exponent bits.
    """
    round_to_integer = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves n in the low bits of the mantissa
    t = x * np.float32(1.4426950408889634) + round_to_integer
    n = t - round_to_integer
    r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)  # ln 2 in two parts
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    power = bits_float((float_bits(t) << np.int32(23)) + np.int32(0x3F800000))
    return np.float32(0.0) if x < np.float32(-87.0) else p * power
