"""Instructions that numba lacks: memory at an address, atomic counters, a pause for spin loops."""

from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_I64 = ir.IntType(64)


def _to_pointer(_typing_context: Any, _address: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


def _atomic_add(_typing_context: Any, _address: Any, _value: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


def _atomic_load(_typing_context: Any, _address: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), codegen


def _atomic_store(_typing_context: Any, _address: Any, _value: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _atomic_replace(_typing_context: Any, _address: Any, _expected: Any, _value: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        result = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


def emit_call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Emits a call of one of LLVM's functions, by its name and the type of its result."""
    get_or_insert_function: Any = cgutils.get_or_insert_function  # untyped
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(get_or_insert_function(builder.module, kind, name), arguments)


def emit_prefetch(builder: Any, address: Any) -> None:
    """Prefetches a cache line into the second-level cache. Any address is valid, and results do not depend on it.

    What a tile prefetches is read so late that the first level may have lost it. And there few lines can be on their
    way: on a Zen 4 the same prefetches into the first level read 9 GB/s of keys and values on one thread instead of 14,
    and 14 GB/s of fp32 weights for 8 rows instead of 19.
    """
    pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    )
    read, second_level, data = i32(0), i32(2), i32(1)
    builder.call(function, [builder.inttoptr(address, pointer), read, second_level, data])


# Functions of the C library, found by name when a kernel is loaded.
yield_core: Any = types.ExternalFunction("sched_yield", types.int32())
read_bytes: Any = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
"""read_bytes(file descriptor, address, count): blocks until bytes are there; returns how many were read."""
write_bytes: Any = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


def _call_item(_typing_context: Any, _code: Any, _instruction: Any, _value: Any, _item: Any, _scratch: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(8).as_pointer(), [argument.type for argument in args[1:]])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, types.int64), codegen


call_item: Any = intrinsic(_call_item)
"""call_item(code, instruction, value, item, scratch): calls the kernel of items at the address `code`."""


def emit_cycles(builder: Any) -> Any:
    """Reads the CPU's time stamp counter. On ARM it is the virtual counter: older LLVMs take that of cycles, which
    Linux keeps from processes.
    """
    kind = ir.FunctionType(_I64, [])
    if builder.module.triple.startswith(("aarch64", "arm64")):
        binding.initialize_native_asmparser()  # which numba does not do: LLVM would abort
        return builder.asm(kind, "mrs $0, cntvct_el0", "=r", [], side_effect=True)
    return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", [], kind), [])


def _cycles(_typing_context: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        return emit_cycles(builder)

    return types.int64(), codegen


cycles: Any = intrinsic(_cycles)
"""cycles(): the CPU's time stamp counter, in ticks of constant length; reading takes 20 cycles."""

_numba: Any = numba  # what it exports is not typed
_carray: Any = _numba.carray
_pointer: Any = intrinsic(_to_pointer)
atomic_add: Any = intrinsic(_atomic_add)
"""atomic_add(address, value) of an int64; returns the previous value."""
atomic_load: Any = intrinsic(_atomic_load)
atomic_store: Any = intrinsic(_atomic_store)
atomic_replace: Any = intrinsic(_atomic_replace)
"""atomic_replace(address, expected, value) of an int64; returns whether it held the expected value, and is replaced."""


@njit(inline="always")
def floats_at(address: int, shape: Any) -> Any:
    """Returns the fp32 values at an address as an array."""
    return _carray(_pointer(address), shape, np.float32)


@njit(inline="always")
def bytes_at(address: int, shape: Any) -> Any:
    """Returns the int8 values at an address as an array."""
    return _carray(_pointer(address), shape, np.int8)


@njit(inline="always")
def shorts_at(address: int, shape: Any) -> Any:
    """Returns the int16 values at an address as an array."""
    return _carray(_pointer(address), shape, np.int16)


@njit(inline="always")
def words_at(address: int, shape: Any) -> Any:
    """Returns the int32 values at an address as an array."""
    return _carray(_pointer(address), shape, np.int32)


@njit(inline="always")
def longs_at(address: int, shape: Any) -> Any:
    """Returns the int64 values at an address as an array."""
    return _carray(_pointer(address), shape, np.int64)
