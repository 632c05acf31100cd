"""Widening of bf16 and fp16 to fp32, which is exact, in LLVM's instructions, and rounding to bf16."""

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.intrinsics import words_at
from kernels.cpu.jit import float_bits, inline, strict_kernel

if TYPE_CHECKING:
    from kernels.cpu.arrays import Floats

_I16, _I32, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


def emit_bf16_to_fp32(builder: Any, bits: Any) -> Any:
    """Widens bf16, given as one i16 or a vector of them: its bits are the upper half of the fp32 value."""
    words = builder.zext(bits, _like(bits, _I32))
    return builder.bitcast(builder.shl(words, _constant(words, 16)), _like(bits, _F32))


def emit_fp16_to_fp32(builder: Any, bits: Any) -> Any:
    """Widens fp16, given as one i16 or a vector of them; by the CPU if it can, else by integer operations."""
    if cpu_features().fp16:
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


@inline
def rounded_to_bf16(x: np.float32) -> np.int32:
    """Returns 32 bits whose upper half is the nearest bf16, of two equally near ones the even one; NaN stays NaN."""
    bits = float_bits(x)
    half_unit = np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))
    is_nan = (bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000)
    return np.int32(bits | np.int32(0x400000)) if is_nan else np.int32(bits + half_unit)


@strict_kernel
def round_row_to_bf16(x: "Floats", target: int) -> None:
    """Rounds x [n] fp32 to bf16, and writes [ceil(n / 2)] pairs at an address; the last one may end with a zero."""
    num_pairs = x.shape[0] // 2
    pairs = words_at(target, num_pairs + 1)
    for i in range(num_pairs):
        low = (rounded_to_bf16(x[2 * i]) >> np.int32(16)) & np.int32(0xFFFF)
        pairs[i] = low | (rounded_to_bf16(x[2 * i + 1]) & np.int32(-65536))
    if x.shape[0] % 2:
        pairs[num_pairs] = (rounded_to_bf16(x[2 * num_pairs]) >> np.int32(16)) & np.int32(0xFFFF)
