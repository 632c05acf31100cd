"""Products with weights that have factors per group of inputs, one tile at a time (`kernels.cpu.tile`)."""

from collections.abc import Iterable, Iterator
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.byte_products import emit_byte_products
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.group_integers import emit_halves, emit_word, of_ints
from kernels.cpu.intrinsics import emit_call
from kernels.cpu.jit import kernel
from kernels.cpu.tile import (
    BYTES,
    FLOATS,
    INTS,
    LANES,
    Fp32Operands,
    Operands,
    Planes,
    Tile,
    broadcast,
    emit_fma,
    load,
    tile_intrinsic,
)
from kernels.microscaled_weights import VALUES

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class _Groups(Fp32Operands):
    """B is unsigned integers, each widened to value * scale + offset of its group, rounded once; A is fp32."""

    has_groups = True

    @classmethod
    def load_terms(cls, builder: Any, address: Any, factors: Any, planes: Planes | None) -> Iterator[Any]:
        for value in cls.load_values(builder, address, planes):
            yield emit_fma(builder, value, *factors)

    @classmethod
    def load_values(cls, builder: Any, address: Any, planes: Planes | None) -> Iterator[Any]:
        """Yields vectors of integers in fp32."""
        raise NotImplementedError


class _Groups8(_Groups):
    """Four integers of 8 bits in a word."""

    terms = 4

    @classmethod
    def load_values(cls, builder: Any, address: Any, _planes: Planes | None) -> Iterator[Any]:
        word = emit_word(builder, address)
        for place in range(4):
            yield _byte(builder, word, place)


class _Groups4(_Groups):
    """Eight integers of 4 bits in a word."""

    terms, together = 8, 1

    @classmethod
    def load_values(cls, builder: Any, address: Any, _planes: Planes | None) -> Iterator[Any]:
        word = emit_word(builder, address)
        for shift in range(0, 32, 4):
            bits = builder.lshr(word, of_ints(shift))
            if cpu_features().avx512:
                yield _looked_up(builder, map(float, range(16)), bits)
            else:
                yield builder.sitofp(builder.and_(bits, of_ints(15)), FLOATS)


class _GroupsInPlanes(_Groups):
    """Eight integers of 5 or 6 bits, low bits in a word; one form for both, as each takes seconds to compile."""

    terms, together = 8, 1
    has_planes = True

    @classmethod
    def load_values(cls, builder: Any, address: Any, planes: Planes | None) -> Iterator[Any]:
        halves = emit_halves(builder, address, planes)
        for place in range(8):
            yield _byte(builder, halves[place % 2], place // 2)


class _Int8Groups8(Operands):
    """As `_Groups8`, with A of four signed bytes for each word; the sums of a group are exact."""

    cell, sums, group_sums = _I32, FLOATS, INTS
    has_groups = True

    @classmethod
    def load_terms(cls, builder: Any, address: Any, _factors: Any, _planes: Planes | None) -> Iterator[Any]:
        yield emit_word(builder, address)

    @staticmethod
    def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
        return emit_byte_products(builder, total, b, a)

    @staticmethod
    def add_group(builder: Any, total: Any, group_sum: Any, factors: Any, row_factors: Any) -> Any:
        (scales, offsets), (row_scale, row_sum) = factors, row_factors
        scaled = builder.fmul(builder.sitofp(group_sum, FLOATS), scales)
        total = emit_fma(builder, scaled, row_scale, total)
        return emit_fma(builder, offsets, row_sum, total)


class _Int8Groups4(_Int8Groups8):
    """As `_Int8Groups8`, with 4 bits: of eight inputs A has a word of those at even places, then of the others."""

    terms = 2

    @classmethod
    def load_terms(cls, builder: Any, address: Any, _factors: Any, planes: Planes | None) -> Iterator[Any]:
        yield from emit_halves(builder, address, planes)


class _Int8GroupsInPlanes(_Int8Groups4):
    """As `_Int8Groups4`, with 5 or 6 bits."""

    has_planes = True


class _Microscaled(Fp32Operands):
    """B is codes of E2M1 in halves of bytes, as in `_Groups4`, times a scale of their group and column; A is fp32.

    One form for scales of MXFP4 and NVFP4, as each takes seconds to compile.
    """

    has_groups = True
    factor_bytes = LANES
    terms = 2

    @staticmethod
    def load_factors(builder: Any, address: Any, tile: Tile, vector: int) -> Any:
        """Widens the scales of a group and multiplies them by those of columns, rounded once."""
        codes = builder.zext(load(builder, address, BYTES, 1), INTS)
        is_e4m3 = builder.icmp_unsigned("!=", broadcast(builder, builder.trunc(tile.has_e4m3, _I32)), of_ints(0))
        scales = builder.select(is_e4m3, _e4m3(builder, codes), _power_of_two(builder, codes))
        columns = load(builder, builder.add(tile.scales, _I64(4 * LANES * vector)), FLOATS, 4)
        return builder.fmul(scales, columns)

    @classmethod
    def load_terms(cls, builder: Any, address: Any, factors: Any, _planes: Planes | None) -> Iterator[Any]:
        for codes in _halves_of_bytes(builder, address):
            yield builder.fmul(_twice_e2m1(builder, codes), factors)


def _power_of_two(builder: Any, exponents: Any) -> Any:
    """Emits 2 ** (exponent - 127)."""
    bits = builder.shl(exponents, of_ints(23))
    is_least = builder.icmp_unsigned("==", exponents, of_ints(0))
    return builder.bitcast(builder.select(is_least, of_ints(1 << 22), bits), FLOATS)  # 2 ** -127


def _e4m3(builder: Any, codes: Any) -> Any:
    """Emits the values of codes of E4M3 without a sign: 8 + m stands for 2 ** -6 * (1 + m / 8), m for 2 ** -9 * m."""
    bits = builder.add(builder.shl(codes, of_ints(20)), of_ints(127 - 7 << 23))
    least = builder.fmul(builder.sitofp(codes, FLOATS), ir.Constant(FLOATS, [2.0**-9] * LANES))
    is_least = builder.icmp_unsigned("<", codes, of_ints(8))
    return builder.select(is_least, least, builder.bitcast(bits, FLOATS))


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
    return emit_call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, ir.Constant(FLOATS, list(table)), indices)


def _bytes(value: int) -> Any:
    return ir.Constant(BYTES, [value] * LANES)


def _byte(builder: Any, words: Any, place: int) -> Any:
    """Emits a byte of each word in fp32; those of place 0 are the lowest."""
    kind = ir.VectorType(ir.IntType(8), 4 * LANES)
    of_zeros = [4 * LANES] * 3
    indices = [index for lane in range(LANES) for index in (4 * lane + place, *of_zeros)]
    mask = ir.Constant(ir.VectorType(_I32, 4 * LANES), indices)
    bytes_ = builder.shuffle_vector(builder.bitcast(words, kind), ir.Constant(kind, None), mask)
    return builder.sitofp(builder.bitcast(bytes_, INTS), FLOATS)


_microscaled = tile_intrinsic(_Microscaled)
_groups_4, _groups_in_planes, _groups_8 = (tile_intrinsic(kind) for kind in (_Groups4, _GroupsInPlanes, _Groups8))
_int8_groups_4, _int8_groups_in_planes, _int8_groups_8 = (
    tile_intrinsic(kind) for kind in (_Int8Groups4, _Int8GroupsInPlanes, _Int8Groups8)
)


@kernel
def multiply_grouped(
    num_bits: int,
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
        num_bits: of the integers of B, [columns / LANES, depth * num_bits / 32, LANES] words (`group_integers`).
        group_size: terms of each group, a multiple of 8.
        num_groups: groups of terms.
        start: address of one fp32 for each column.
        factors: address of scales and offsets, [columns / LANES, num_groups, 2, LANES] fp32.
    """
    steps, step = group_size // (8 if num_bits < 8 else 4), 4 * LANES
    plane_bytes, panel_step = step * steps * num_groups, group_size * num_groups * num_bits * LANES // 8
    tile = Tile(
        a, b, step, panel_step, steps, start, 0, c, c_step, ahead, panel_step, 0, 0, 0, num_groups, factors,
        num_bits - 4, plane_bytes,
    )  # fmt: skip
    if num_bits == 4:
        _groups_4(num_rows, wide, tile)
    elif num_bits < 8:
        _groups_in_planes(num_rows, wide, tile)
    else:
        _groups_8(num_rows, wide, tile)


@kernel
def multiply_int8_by_groups(
    num_bits: int,
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
        a: address of words of four values, [depth / 4, num_rows]: inputs in their order; below 8 bits, of each
            eight those at even places, then the others.
        row_factors: address of scales, and sums of values times these, [num_groups, 2, num_rows] fp32.
    """
    steps, step = group_size // (8 if num_bits < 8 else 4), 4 * LANES
    plane_bytes, panel_step = step * steps * num_groups, group_size * num_groups * num_bits * LANES // 8
    tile = Tile(
        a, b, step, panel_step, steps, start, 0, c, c_step, ahead, panel_step, 0, row_factors, 0, num_groups, factors,
        num_bits - 4, plane_bytes,
    )  # fmt: skip
    if num_bits == 4:
        _int8_groups_4(num_rows, wide, tile)
    elif num_bits < 8:
        _int8_groups_in_planes(num_rows, wide, tile)
    else:
        _int8_groups_8(num_rows, wide, tile)


@kernel
def multiply_microscaled(
    has_e4m3: int,
    num_rows: int,
    wide: bool,
    a: int,
    b: int,
    group_size: int,
    num_groups: int,
    start: int,
    factors: int,
    scales: int,
    c: int,
    c_step: int,
    ahead: int,
) -> None:
    """As `multiply_fp32`, with B in MXFP4 or NVFP4: the same bits as with its values in fp32.

    Args:
        has_e4m3: whether factors are E4M3 without a sign; otherwise they are exponents of two, from -127.
        b: address of codes, [columns / LANES, depth / 2, LANES] bytes, of two rows each.
        group_size: terms of each group, an even number.
        num_groups: groups of terms.
        start: address of one fp32 for each column.
        factors: address of the bytes of factors, [columns / LANES, num_groups, LANES].
        scales: address of half a scale for each column, in fp32.
    """
    steps = group_size // 2
    panel_step = LANES * steps * num_groups
    tile = Tile(
        a, b, LANES, panel_step, steps, start, 0, c, c_step, ahead, panel_step, scales, 0, 0, num_groups, factors,
        0, 0, has_e4m3,
    )  # fmt: skip
    _microscaled(num_rows, wide, tile)
