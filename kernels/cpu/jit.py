"""Compiles the CPU kernels.

Every kernel is cached on disk (`kernel_cache.py`) and releases the GIL. Divisions by zero follow IEEE 754, because a
check would keep loops from being vectorised.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, typeof, types
from numba.core import event
from numba.extending import intrinsic

from kernels.cpu.kernel_cache import KernelCache

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""Allows vectorised sums. `nnan` and `ninf` are left out: a row with a NaN must stay NaN to be reported as failed."""

_type_of: Any = typeof
_Function = TypeVar("_Function", bound=Callable[..., Any])
_OnCompiled = Callable[[int, int], None]

_kernels: list[Any] = []  # all of this process; an engine uses every one of them


def _compile(
    function: _Function,
    *,
    fastmath: set[str] | bool,
    parallel: bool = False,
    cached_as: Callable[..., Any] | None = None,
) -> _Function:
    jitted: Any = njit(nogil=True, error_model="numpy", fastmath=fastmath, parallel=parallel)(function)
    jitted._cache = KernelCache(cached_as or function)
    _kernels.append(jitted)
    return cast(_Function, jitted)


def num_kernels() -> int:
    """Returns how many kernels there are, all of which an engine uses."""
    return len(_kernels)


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


def kernel_around(outer: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles `outer`, a closure, as a kernel that has the name of `inner`, its only content."""
    outer.__name__, outer.__qualname__, outer.__module__ = inner.__name__, inner.__qualname__, inner.__module__
    return _compile(outer, fastmath=FASTMATH, cached_as=inner)


def inline(function: _Function) -> _Function:
    """Compiles a function that is inlined into the kernels that call it.

    It is not cached by itself: numba caches object code, which can be called but not inlined, so a kernel compiled
    around a cached function would be slow.
    """
    return cast(_Function, njit(nogil=True, error_model="numpy", fastmath=FASTMATH)(function))


def inline_in_order(function: _Function) -> _Function:
    """Compiles a function like `inline`, whose products of several factors are computed from left to right.

    Where a compiler may choose the order, it makes other choices in the loop that it runs if rows are near each other.
    """
    in_order = FASTMATH - {"reassoc"}
    return cast(_Function, njit(nogil=True, error_model="numpy", fastmath=in_order)(function))


def spliced(function: _Function) -> _Function:
    """Compiles a function as a part of the kernels that call it, with their options, and never by itself.

    For the large functions that only one or two kernels call: numba would optimise all that they call once more.
    """
    return cast(_Function, njit(inline="always", nogil=True, error_model="numpy", fastmath=FASTMATH)(function))


def compile_now(function: Callable[..., Any], signature: str) -> None:
    """Compiles a kernel, or loads it from the disk, for arguments of these types (numba's names)."""
    cast(Any, function).compile(f"({signature},)")


def address_of(function: Callable[..., Any], signature: str) -> int:
    """Returns where the code of a kernel is, for callers in C's convention; compiles it, or loads it from the disk.

    Args:
        function: the kernel; its code lives as long as it does.
        signature: types of the arguments, in numba's names.
    """
    compile_now(function, signature)
    (compiled,) = cast(Any, function).overloads.values()
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))


def compile_for(function: Callable[..., Any], *arguments: Any) -> None:
    """Compiles a kernel, or loads it from the disk, for arguments like these; it is not called."""
    cast(Any, function).compile(tuple(_type_of(argument) for argument in arguments))


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


def strict_function(function: _Function) -> _Function:
    """Compiles a strict function that LLVM inlines into callers of any kind: its operations stay as written in them.

    One flagged operation is enough: on ARM, LLVM fuses an addition that may be contracted with a product that may not.
    """
    return cast(_Function, njit(nogil=True, error_model="numpy", fastmath=False)(function))


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


# With the caller's flags, `reassoc` would cancel the two uses of round_to_integer.
@strict_function
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
