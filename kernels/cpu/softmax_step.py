"""One step of online softmax (arXiv:2307.08691) over 32 scores of a row, written in LLVM's vector instructions.

Unlike a compiled loop, it keeps two vectors of scores in registers from their maximum to their sum, in a third of the
time. All sums have a fixed order.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.tile import FLOATS, INTS, LANES, broadcast, emit_fma

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

# exp(r) on [-ln(2) / 2, ln(2) / 2] (Cephes expf), the highest power first
_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves a rounded value in the low bits of the mantissa


def _all(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def _all_ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduce(builder: Any, vector: Any, combine: Any) -> Any:
    """Reduces all lanes to one by halves, in a fixed order."""
    distance = LANES // 2
    while distance:
        lanes = ir.Constant(INTS, [(lane + distance) % LANES for lane in range(LANES)])
        vector = combine(builder, vector, builder.shuffle_vector(vector, ir.Constant(FLOATS, ir.Undefined), lanes))
        distance //= 2
    return builder.extract_element(vector, _I32(0))


def _exp_nonpositive(builder: Any, x: Any) -> Any:
    """Exp of 16 values <= 0, relative error 1e-7; 0 below -87, NaN stays NaN."""
    shifted = emit_fma(builder, x, _all(1.4426950408889634), _all(_ROUND))
    n = builder.fsub(shifted, _all(_ROUND))
    r = emit_fma(builder, n, _all(-0.693359375), x)  # ln 2 in two parts
    r = emit_fma(builder, n, _all(2.12194440e-4), r)
    p = _all(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        p = emit_fma(builder, p, r, _all(coefficient))
    p = emit_fma(builder, builder.fmul(p, r), r, r)
    p = builder.fadd(p, _all(1.0))
    exponent = builder.shl(builder.bitcast(shifted, INTS), _all_ints(23))
    power = builder.bitcast(builder.add(exponent, _all_ints(0x3F800000)), FLOATS)
    return builder.select(builder.fcmp_ordered("<", x, _all(-87.0)), _all(0.0), builder.fmul(p, power))


def _vector_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, FLOATS.as_pointer())


def _softmax_step(_typing_context: Any, _scores: Any, _state: Any, _acc: Any, _acc_bytes: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        scores, state, acc, acc_bytes = args
        places = [_vector_at(builder, builder.add(scores, _I64(4 * LANES * half))) for half in range(2)]
        values = [builder.load(place) for place in places]
        for value in values:
            value.align = 4
        state_pointer = builder.inttoptr(state, _F32.as_pointer())
        total_pointer = builder.gep(state_pointer, [_I64(1)])
        before = builder.load(state_pointer)
        largest = _larger(builder, _reduce(builder, _larger(builder, *values), _larger), before)
        weights = [_exp_nonpositive(builder, builder.fsub(value, broadcast(builder, largest))) for value in values]
        for place, weight in zip(places, weights, strict=True):
            builder.store(weight, place).align = 4
        total = _reduce(builder, builder.fadd(*weights), lambda b, x, y: b.fadd(x, y))
        with builder.if_then(builder.fcmp_ordered("!=", largest, before), likely=False):
            factor = _exp_nonpositive(builder, broadcast(builder, builder.fsub(before, largest)))
            with cgutils.for_range_slice(builder, _I64(0), acc_bytes, _I64(4 * LANES), _I64) as (offset, _):
                place = _vector_at(builder, builder.add(acc, offset))
                value = builder.load(place)
                value.align = 4
                builder.store(builder.fmul(value, factor), place).align = 4
            scaled = builder.fmul(builder.load(total_pointer), builder.extract_element(factor, _I32(0)))
            builder.store(scaled, total_pointer)
            builder.store(largest, state_pointer)
        builder.store(builder.fadd(builder.load(total_pointer), total), total_pointer)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


softmax_step: Any = intrinsic(_softmax_step)
"""softmax_step(scores, state, acc, acc_bytes) of one row: turns scores into weights relative to the largest so far.

All are addresses: of 32 scores; of the largest score and the sum of weights; of the weighted values, acc_bytes of them,
which are rescaled when a larger score appears. A NaN score makes the sum NaN."""
