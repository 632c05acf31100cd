"""Widening of bf16 and fp16 to fp32, which is exact, in LLVM's instructions: of one value or of a vector."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.cpu_features import cpu_features

_I16, _I32, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


def emit_bf16_to_fp32(builder: Any, bits: Any) -> Any:
    """Widens bf16, given as one i16 or a vector of them: its bits are the upper half of the fp32 value."""
    words = builder.zext(bits, _like(bits, _I32))
    return builder.bitcast(builder.shl(words, _constant(words, 16)), _like(bits, _F32))


def emit_fp16_to_fp32(builder: Any, bits: Any) -> Any:
    """Widens fp16, given as one i16 or a vector of them; by F16C if the CPU has it, else by integer operations."""
    if cpu_features().f16c:
        return builder.fpext(builder.bitcast(bits, _like(bits, _F16)), _like(bits, _F32))
    return emit_fp16_by_integers(builder, bits)


def emit_fp16_by_integers(builder: Any, bits: Any) -> Any:
    """Widens fp16 on any CPU: moves the fields, and rebiases the exponent from 15 to 127.

    A subnormal m * 2^-24 is computed as 2^-14 * (1 + m / 1024) - 2^-14, so that no fp32 subnormal occurs, which a
    thread's rounding mode could flush to zero.
    """
    floats = _like(bits, _F32)
    words = builder.zext(bits, _like(bits, _I32))
    magnitude = builder.and_(words, _constant(words, 0x7FFF))
    sign = builder.shl(builder.and_(words, _constant(words, 0x8000)), _constant(words, 16))
    fields = builder.shl(magnitude, _constant(words, 13))
    is_finite = builder.icmp_unsigned("<", magnitude, _constant(words, 0x7C00))
    rebias = builder.select(is_finite, _constant(words, 112 << 23), _constant(words, 224 << 23))
    least_normal = builder.bitcast(_constant(words, 113 << 23), floats)
    above_it = builder.bitcast(builder.add(fields, _constant(words, 113 << 23)), floats)
    subnormal = builder.bitcast(builder.fsub(above_it, least_normal), words.type)
    is_subnormal = builder.icmp_unsigned("<", magnitude, _constant(words, 0x0400))
    value = builder.select(is_subnormal, subnormal, builder.add(fields, rebias))
    return builder.bitcast(builder.or_(value, sign), floats)


def _like(value: Any, element: Any) -> Any:
    """Returns the type of as many elements as the value has."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _constant(like: Any, number: int) -> Any:
    is_vector = isinstance(like.type, ir.VectorType)
    return ir.Constant(like.type, [number] * like.type.count if is_vector else number)


def _scalar(emit: Any) -> Any:
    def widen(_typing_context: Any, _bits: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return emit(builder, args[0])

        return types.float32(types.int16), codegen

    return intrinsic(widen)


bf16_to_fp32: Any = _scalar(emit_bf16_to_fp32)
"""The fp32 value of a bf16, given by its bits as an int16."""
fp16_to_fp32: Any = _scalar(emit_fp16_to_fp32)
"""The fp32 value of an fp16, given by its bits as an int16."""
fp16_by_integers: Any = _scalar(emit_fp16_by_integers)
"""The same as `fp16_to_fp32`, without F16C."""
