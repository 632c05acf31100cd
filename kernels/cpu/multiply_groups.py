"""Products with weights that have factors per group of inputs, one tile at a time (`kernels.cpu.tile`)."""

from collections.abc import Iterable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.jit import kernel
from kernels.cpu.tile import (
    BYTES,
    FLOATS,
    INTS,
    LANES,
    Fp32Operands,
    Operands,
    Tile,
    emit_fma,
    emit_vpdpbusd,
    load,
    tile_intrinsic,
)
from kernels.microscaled_weights import GROUP_SIZE, VALUES

_I32 = ir.IntType(32)


class _Groups8(Fp32Operands):
    """B is words of four unsigned bytes, each widened to value * scale + offset of its group, rounded once.

    A is fp32.
    """

    has_groups = True
    terms = 4

    @classmethod
    def load_terms(cls, builder: Any, address: Any, factors: Any) -> Any:
        return _widened(builder, load(builder, address, INTS, 4), 8, factors)


class _Groups4(Fp32Operands):
    """As `_Groups8`, with eight halves of bytes in a word."""

    has_groups = True
    terms = 8

    @classmethod
    def load_terms(cls, builder: Any, address: Any, factors: Any) -> Any:
        return _widened(builder, load(builder, address, INTS, 4), 4, factors)


class _Int8Groups8(Operands):
    """As `_Groups8`, with A of four signed bytes for each word; the sums of a group are exact."""

    cell, sums, group_sums = _I32, FLOATS, INTS
    has_groups = True

    @classmethod
    def load_terms(cls, builder: Any, address: Any, _factors: Any) -> Any:
        return (load(builder, address, INTS, 4),)

    @staticmethod
    def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
        return emit_vpdpbusd(builder, total, b, a)

    @staticmethod
    def add_group(builder: Any, total: Any, group_sum: Any, factors: Any, row_factors: Any) -> Any:
        (scales, offsets), (row_scale, row_sum) = factors, row_factors
        scaled = builder.fmul(builder.sitofp(group_sum, FLOATS), scales)
        total = emit_fma(builder, scaled, row_scale, total)
        return emit_fma(builder, offsets, row_sum, total)


class _Int8Groups4(_Int8Groups8):
    """As `_Int8Groups8`, with eight halves of bytes: A has a word of four for the low ones, then for the high ones."""

    terms = 2

    @classmethod
    def load_terms(cls, builder: Any, address: Any, _factors: Any) -> Any:
        word, low = load(builder, address, INTS, 4), _ints(0x0F0F0F0F)
        return builder.and_(word, low), builder.and_(builder.lshr(word, _ints(4)), low)


class _Microscaled(Fp32Operands):
    """B is codes of E2M1 in halves of bytes, as in `_Groups4`, times a power of two of their group; A is fp32."""

    has_groups = True
    factor_bytes = LANES
    terms = 2

    @staticmethod
    def load_factors(builder: Any, address: Any) -> Any:
        """Loads halves of 2 ** (exponent - 127), because codes stand for twice their value."""
        exponents = builder.zext(load(builder, address, BYTES, 1), INTS)
        bits = builder.shl(exponents, ir.Constant(INTS, [23] * LANES))
        is_least = builder.icmp_unsigned("==", exponents, ir.Constant(INTS, [0] * LANES))
        bits = builder.select(is_least, ir.Constant(INTS, [1 << 22] * LANES), bits)  # 2 ** -127
        return builder.fmul(builder.bitcast(bits, FLOATS), ir.Constant(FLOATS, [0.5] * LANES))

    @classmethod
    def load_terms(cls, builder: Any, address: Any, factors: Any) -> Any:
        return tuple(builder.fmul(_twice_e2m1(builder, codes), factors) for codes in _halves_of_bytes(builder, address))


def _halves_of_bytes(builder: Any, address: Any) -> tuple[Any, Any]:
    pairs = load(builder, address, BYTES, 1)
    return builder.and_(pairs, _bytes(15)), builder.lshr(pairs, _bytes(4))


def _twice_e2m1(builder: Any, codes: Any) -> Any:
    """Emits twice the values of codes in fp32, of those without a sign 0, 1, 2, 3, 4, 6, 8, 12: from a register."""
    if cpu_features().avx512:
        twice = [2 * value for value in VALUES]
        return _looked_up(builder, twice + [-value for value in twice], builder.zext(codes, INTS))
    magnitude = builder.and_(codes, _bytes(7))
    above_4 = builder.icmp_unsigned(">", magnitude, _bytes(4))
    twice = builder.add(magnitude, builder.select(above_4, builder.sub(magnitude, _bytes(4)), _bytes(0)))
    above_6 = builder.icmp_unsigned(">", magnitude, _bytes(6))
    twice = builder.add(twice, builder.select(above_6, _bytes(2), _bytes(0)))
    is_negative = builder.icmp_unsigned(">", codes, _bytes(7))
    signed = builder.select(is_negative, builder.sub(_bytes(0), twice), twice)
    return builder.sitofp(builder.sext(signed, INTS), FLOATS)


def _looked_up(builder: Any, table: Iterable[float], indices: Any) -> Any:
    """Emits one of 16 numbers for each index, of which the low 4 bits count: one instruction of AVX-512."""
    get_or_insert_function: Any = cgutils.get_or_insert_function  # untyped
    permute = get_or_insert_function(
        builder.module, ir.FunctionType(FLOATS, [FLOATS, INTS]), "llvm.x86.avx512.permvar.sf.512"
    )
    return builder.call(permute, [ir.Constant(FLOATS, list(table)), indices])


def _bytes(value: int) -> Any:
    return ir.Constant(BYTES, [value] * LANES)


def _ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def _widened(builder: Any, words: Any, num_bits: int, factors: Any) -> Any:
    """Emits the values of words, the lowest first, each times the scale plus the offset."""
    scales, offsets = factors
    values = []
    for shift in range(0, 32, num_bits):
        bits = builder.lshr(words, _ints(shift))
        if num_bits == 4 and cpu_features().avx512:
            floats = _looked_up(builder, map(float, range(16)), bits)
        else:
            floats = builder.sitofp(builder.and_(bits, _ints((1 << num_bits) - 1)), FLOATS)
        values.append(emit_fma(builder, floats, scales, offsets))
    return tuple(values)


_groups_8, _groups_4, _microscaled = (tile_intrinsic(kind) for kind in (_Groups8, _Groups4, _Microscaled))
_int8_groups_8, _int8_groups_4 = (
    tile_intrinsic(kind if cpu_features().vnni else _Groups8)  # unused without VNNI, but compiled
    for kind in (_Int8Groups8, _Int8Groups4)
)
_MICROSCALED_GROUP = GROUP_SIZE


@kernel
def multiply_grouped(
    is_4_bits: bool,
    num_rows: int,
    wide: bool,
    a: int,
    b: int,
    group_size: int,
    num_groups: int,
    start: int,
    factors: int,
    c: int,
    c_step: int,
    ahead: int,
) -> None:
    """As `multiply_fp32`, with B of unsigned integers: the same bits as with value * scale + offset, rounded to fp32.

    Args:
        is_4_bits: B is [columns / LANES, depth / 8, LANES] words of eight values; otherwise, with depth / 4, of four.
        group_size: terms of each group, a multiple of 8.
        num_groups: groups of terms.
        start: address of one fp32 for each column.
        factors: address of scales and offsets, [columns / LANES, num_groups, 2, LANES] fp32.
    """
    steps, step = group_size // 8 if is_4_bits else group_size // 4, 4 * LANES
    panel_step = step * steps * num_groups
    tile = Tile(a, b, step, panel_step, steps, start, 0, c, c_step, ahead, panel_step, 0, 0, 0, num_groups, factors)
    if is_4_bits:
        _groups_4(num_rows, wide, tile)
    else:
        _groups_8(num_rows, wide, tile)


@kernel
def multiply_int8_by_groups(
    is_4_bits: bool,
    num_rows: int,
    wide: bool,
    a: int,
    b: int,
    group_size: int,
    num_groups: int,
    start: int,
    factors: int,
    row_factors: int,
    c: int,
    c_step: int,
    ahead: int,
) -> None:
    """As `multiply_grouped`, with A of int8: C = start + for each group (A B) * scale * row scale + offset * row sum.

    Args:
        num_rows: 1 to MAX_ROWS // 2, or to MAX_ROWS // 4 if wide.
        a: address of words of four values, [depth / 4, num_rows]: inputs in their order; with 4 bits, of each eight
            those at even places, then the others.
        row_factors: address of scales, and sums of values times these, [num_groups, 2, num_rows] fp32.
    """
    steps, step = group_size // 8 if is_4_bits else group_size // 4, 4 * LANES
    panel_step = step * steps * num_groups
    tile = Tile(
        a, b, step, panel_step, steps, start, 0, c, c_step, ahead, panel_step, 0, row_factors, 0, num_groups, factors
    )
    if is_4_bits:
        _int8_groups_4(num_rows, wide, tile)
    else:
        _int8_groups_8(num_rows, wide, tile)


@kernel
def multiply_microscaled(
    num_rows: int,
    wide: bool,
    a: int,
    b: int,
    num_groups: int,
    start: int,
    factors: int,
    c: int,
    c_step: int,
    ahead: int,
) -> None:
    """As `multiply_fp32`, with B in MXFP4: the same bits as with its values in fp32.

    Args:
        b: address of codes, [columns / LANES, depth / 2, LANES] bytes, of two rows each.
        num_groups: groups of 32 terms.
        start: address of one fp32 for each column.
        factors: address of exponents, [columns / LANES, num_groups, LANES] bytes.
    """
    steps = _MICROSCALED_GROUP // 2
    panel_step = LANES * steps * num_groups
    tile = Tile(a, b, LANES, panel_step, steps, start, 0, c, c_step, ahead, panel_step, 0, 0, 0, num_groups, factors)
    _microscaled(num_rows, wide, tile)
