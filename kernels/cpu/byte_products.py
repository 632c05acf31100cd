"""Products of unsigned and signed bytes, four summed into each lane of 32 bits, by whatever instruction the CPU has.

The sums are exact, so that all instructions give the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.cpu_features import ByteProducts, cpu_features
from kernels.cpu.intrinsics import emit_call

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)


def emit_byte_products(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Emits total + the products of four unsigned and four signed bytes in each lane.

    Args:
        total, unsigned, signed: vectors of 32-bit lanes, of any number that the instruction's divides.
    """
    return emit_byte_products_by(cpu_features().byte_products, builder, total, unsigned, signed)


def emit_byte_products_by(instruction: ByteProducts, builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Emits the same with a certain instruction."""
    form = _FORMS[instruction]
    values = (total, unsigned, signed)
    parts = [
        form.emit(builder, *(_lanes(builder, value, first, form.lanes) for value in values))
        for first in range(0, total.type.count, form.lanes)
    ]
    return _joined(builder, parts)


def _vpdpbusd(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}"  # AVX-VNNI shares the one of 256 bits
    return emit_call(builder, name, total.type, total, unsigned, signed)


def _usdot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    return _neon(builder, "usdot", total, _as(builder, unsigned, _I8), _as(builder, signed, _I8))


def _sdot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Multiplies signed bytes only: of unsigned - 128, and of -128, which is subtracted."""
    signed = _as(builder, signed, _I8)
    least = ir.Constant(signed.type, [-128] * signed.type.count)
    total = _neon(builder, "sdot", total, builder.xor(_as(builder, unsigned, _I8), least), signed)
    return builder.sub(total, _neon(builder, "sdot", ir.Constant(total.type, None), least, signed))


def _neon(builder: Any, name: str, total: Any, left: Any, right: Any) -> Any:
    return emit_call(builder, f"llvm.aarch64.neon.{name}.v4i32.v16i8", total.type, total, left, right)


def _pmaddwd(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Multiplies bytes at even and at odd places as 16-bit numbers, in pairs, whose sums cannot overflow."""
    unsigned, signed = _as(builder, unsigned, _I16), _as(builder, signed, _I16)
    eight, low = (ir.Constant(signed.type, [value] * signed.type.count) for value in (8, 255))
    name = "llvm.x86.avx512.pmaddw.d.512" if total.type.count == 16 else "llvm.x86.avx2.pmadd.wd"
    even = builder.and_(unsigned, low), builder.ashr(builder.shl(signed, eight), eight)
    odd = builder.lshr(unsigned, eight), builder.ashr(signed, eight)
    sums = (emit_call(builder, name, total.type, *factors) for factors in (even, odd))
    return builder.add(total, builder.add(*sums))


def _multiplications(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Multiplies bytes as 32-bit numbers, without any instruction for it."""
    for place in range(4):
        left, right = (ir.Constant(total.type, [bits] * total.type.count) for bits in (24 - 8 * place, 24))
        unsigned_byte = builder.lshr(builder.shl(unsigned, left), right)
        signed_byte = builder.ashr(builder.shl(signed, left), right)
        total = builder.add(total, builder.mul(unsigned_byte, signed_byte))
    return total


class _Form(NamedTuple):
    """How an instruction multiplies its number of lanes."""

    lanes: int
    emit: Callable[[Any, Any, Any, Any], Any]


_FORMS = {
    ByteProducts.AVX512_VNNI: _Form(16, _vpdpbusd),
    ByteProducts.AVX512: _Form(16, _pmaddwd),
    ByteProducts.AVX_VNNI: _Form(8, _vpdpbusd),
    ByteProducts.AVX2: _Form(8, _pmaddwd),
    ByteProducts.I8MM: _Form(4, _usdot),
    ByteProducts.DOTPROD: _Form(4, _sdot),
    ByteProducts.GENERIC: _Form(16, _multiplications),
}


def _as(builder: Any, words: Any, kind: Any) -> Any:
    """Takes words as their parts of a type."""
    return builder.bitcast(words, ir.VectorType(kind, words.type.count * 32 // kind.width))


def _lanes(builder: Any, vector: Any, first: int, number: int) -> Any:
    """Takes lanes out of a vector."""
    if vector.type.count == number:
        return vector
    mask = ir.Constant(ir.VectorType(_I32, number), list(range(first, first + number)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _joined(builder: Any, parts: Any) -> Any:
    """Makes one vector of several of equal types, of which there is a power of two."""
    while len(parts) > 1:
        both = ir.VectorType(_I32, 2 * parts[0].type.count)
        mask = ir.Constant(both, list(range(both.count)))
        parts = [builder.shuffle_vector(*pair, mask) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
