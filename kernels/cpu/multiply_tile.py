"""The matrix products of linear layers and of attention, each one tile at a time (`kernels.cpu.tile`)."""

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
    declared,
    emit_fma,
    load,
    tile_intrinsic,
)
from kernels.cpu.two_bytes import emit_bf16_to_fp32, emit_fp16_to_fp32
from kernels.microscaled_weights import GROUP_SIZE, VALUES

_I32 = ir.IntType(32)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


class _Int8AsFp32(Fp32Operands):
    """B is int8, A and the sums are fp32."""

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return builder.sitofp(builder.sext(load(builder, address, BYTES, 1), INTS), FLOATS)


class _Bf16AsFp32(Fp32Operands):
    """B is bf16, A and the sums are fp32."""

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return emit_bf16_to_fp32(builder, load(builder, address, _SHORTS, 2))


class _Fp16AsFp32(Fp32Operands):
    """B is fp16, A and the sums are fp32."""

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return emit_fp16_to_fp32(builder, load(builder, address, _SHORTS, 2))


class _Groups8(Fp32Operands):
    """B is unsigned bytes, each widened to value * scale + offset of its group, rounded once; A is fp32."""

    has_groups = True
    terms = 2

    @classmethod
    def load_terms(cls, builder: Any, address: Any, factors: Any) -> Any:
        addresses = address, builder.add(address, ir.IntType(64)(LANES))
        return tuple(_widened(builder, load(builder, place, BYTES, 1), factors) for place in addresses)


class _Groups4(Fp32Operands):
    """As `_Groups8`, with halves of bytes: the low ones belong to one row of B, the high ones to the next."""

    has_groups = True
    terms = 2

    @classmethod
    def load_terms(cls, builder: Any, address: Any, factors: Any) -> Any:
        return tuple(_widened(builder, half, factors) for half in _halves_of_bytes(builder, address))


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
        table = ir.Constant(FLOATS, twice + [-value for value in twice])
        get_or_insert_function: Any = cgutils.get_or_insert_function  # untyped
        permute = get_or_insert_function(
            builder.module, ir.FunctionType(FLOATS, [FLOATS, INTS]), "llvm.x86.avx512.permvar.sf.512"
        )
        return builder.call(permute, [table, builder.zext(codes, INTS)])
    magnitude = builder.and_(codes, _bytes(7))
    above_4 = builder.icmp_unsigned(">", magnitude, _bytes(4))
    twice = builder.add(magnitude, builder.select(above_4, builder.sub(magnitude, _bytes(4)), _bytes(0)))
    above_6 = builder.icmp_unsigned(">", magnitude, _bytes(6))
    twice = builder.add(twice, builder.select(above_6, _bytes(2), _bytes(0)))
    is_negative = builder.icmp_unsigned(">", codes, _bytes(7))
    signed = builder.select(is_negative, builder.sub(_bytes(0), twice), twice)
    return builder.sitofp(builder.sext(signed, INTS), FLOATS)


def _bytes(value: int) -> Any:
    return ir.Constant(BYTES, [value] * LANES)


def _widened(builder: Any, values: Any, factors: Any) -> Any:
    scales, offsets = factors
    return emit_fma(builder, builder.sitofp(builder.zext(values, INTS), FLOATS), scales, offsets)


class _Vnni(Operands):
    """A is four unsigned, B four signed bytes for each k; the sums are int32, and exact."""

    cell, sums = _I32, INTS
    has_row_scales = True

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return load(builder, address, INTS, 4)

    @staticmethod
    def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
        return builder.call(declared(builder, "llvm.x86.avx512.vpdpbusd.512", INTS), [total, a, b])


class _Bf16Pairs(Operands):
    """A and B are two bf16 for each k; the sums are fp32.

    The upper product is added before the lower one. Each addition rounds to the nearest fp32, and numbers below the
    least normal one count as zeros (VDPBF16PS in Intel's manual).
    """

    cell, sums = _I32, FLOATS

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return load(builder, address, INTS, 4)

    @staticmethod
    def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
        return builder.call(declared(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, INTS), [total, a, b])


_MICROSCALED_GROUP = GROUP_SIZE

WEIGHTS_STEP = 4 * 2 * LANES
"""Bytes from row to row of the weights in `add_values`."""

_fp32, _int8_as_fp32 = tile_intrinsic(Fp32Operands), tile_intrinsic(_Int8AsFp32)
_bf16_weights, _fp16_weights = tile_intrinsic(_Bf16AsFp32), tile_intrinsic(_Fp16AsFp32)
_int8_weights = tile_intrinsic(_Int8AsFp32, is_scaled=True)
_groups_8, _groups_4 = tile_intrinsic(_Groups8), tile_intrinsic(_Groups4)
_microscaled = tile_intrinsic(_Microscaled)
_vnni = tile_intrinsic(
    _Vnni if cpu_features().vnni else _Int8AsFp32, is_scaled=True
)  # unused without VNNI, but compiled
_bf16_pairs = tile_intrinsic(_Bf16Pairs if cpu_features().bf16 else _Bf16AsFp32)  # likewise
_values_fp32, _values_int8 = tile_intrinsic(Fp32Operands, WEIGHTS_STEP), tile_intrinsic(_Int8AsFp32, WEIGHTS_STEP)


@kernel
def multiply_fp32(
    num_rows: int, wide: bool, a: int, b: int, depth: int, c0: int, c0_step: int, c: int, c_step: int, ahead: int
) -> None:
    """Computes one tile of a linear layer, all fp32: C = C0 + A B.

    Args:
        num_rows: 1 to MAX_ROWS, or to MAX_ROWS // 2 if wide.
        wide: 64 columns instead of 32.
        a: address of A, [depth, num_rows].
        b: address of B, [columns / LANES, depth, LANES].
        depth: terms of each sum, at least 1.
        c0: address of the row that the sums of the first row start from.
        c0_step: bytes from there to that of the next row; 0: all start from the same one.
        c: address of the first row of C, which may be that of C0.
        c_step: bytes from row to row of C.
        ahead: b of a later call, prefetched while this one is read.
    """
    step, panel_step = 4 * LANES, 4 * LANES * depth
    tile = Tile(a, b, step, panel_step, depth, c0, c0_step, c, c_step, ahead, panel_step)
    _fp32(num_rows, wide, tile)


@kernel
def multiply_two_byte_weights(
    is_bf16: bool, num_rows: int, wide: bool, a: int, b: int, depth: int, c0: int, c: int, c_step: int, ahead: int
) -> None:
    """As `multiply_fp32`, with B of bf16, or else of fp16, and C0 of one row: the same bits as with B in fp32."""
    step, panel_step = 2 * LANES, 2 * LANES * depth
    tile = Tile(a, b, step, panel_step, depth, c0, 0, c, c_step, ahead, panel_step)
    if is_bf16:
        _bf16_weights(num_rows, wide, tile)
    else:
        _fp16_weights(num_rows, wide, tile)


@kernel
def multiply_bf16(
    num_rows: int, wide: bool, a: int, b: int, depth: int, c0: int, c: int, c_step: int, ahead: int
) -> None:
    """As `multiply_fp32`, with two bf16 of A and two of B in each term, and C0 of one row.

    Needs `CpuFeatures.bf16`.
    """
    step, panel_step = 4 * LANES, 4 * LANES * depth
    tile = Tile(a, b, step, panel_step, depth, c0, 0, c, c_step, ahead, panel_step)
    _bf16_pairs(num_rows, wide, tile)


@kernel
def multiply_int8_weights(
    num_rows: int,
    wide: bool,
    a: int,
    b: int,
    depth: int,
    start: int,
    scales: int,
    bias: int,
    c: int,
    c_step: int,
    ahead: int,
) -> None:
    """As `multiply_fp32`, with B of int8: C = (start + A B) * scales + bias.

    Args:
        start, scales, bias: addresses of one fp32 for each column.
    """
    step, panel_step = LANES, LANES * depth
    tile = Tile(a, b, step, panel_step, depth, start, 0, c, c_step, ahead, panel_step, scales, 0, bias)
    _int8_weights(num_rows, wide, tile)


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
        is_4_bits: B is [columns / LANES, depth / 2, LANES] bytes, of two rows each; otherwise of bytes.
        group_size: terms of each group, an even number.
        num_groups: groups of terms.
        start: address of one fp32 for each column.
        factors: address of scales and offsets, [columns / LANES, num_groups, 2, LANES] fp32.
    """
    steps, b_step = group_size // 2, LANES if is_4_bits else 2 * LANES
    panel_step = b_step * steps * num_groups
    tile = Tile(a, b, b_step, panel_step, steps, start, 0, c, c_step, ahead, panel_step, 0, 0, 0, num_groups, factors)
    if is_4_bits:
        _groups_4(num_rows, wide, tile)
    else:
        _groups_8(num_rows, wide, tile)


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


@kernel
def multiply_vnni(
    num_rows: int,
    wide: bool,
    a: int,
    b: int,
    depth: int,
    start: int,
    scales: int,
    row_scales: int,
    bias: int,
    c: int,
    c_step: int,
    ahead: int,
) -> None:
    """As `multiply_fp32`, with four uint8 of A and four int8 of B in each term: C = (start + A B) * scales + bias.

    Needs `CpuFeatures.vnni`.

    Args:
        start: address of one int32 for each column.
        scales, bias: addresses of one fp32 for each column.
        row_scales: address of one fp32 for each row; a column's and a row's scale are multiplied first.
    """
    step, panel_step = 4 * LANES, 4 * LANES * depth
    tile = Tile(a, b, step, panel_step, depth, start, 0, c, c_step, ahead, panel_step, scales, row_scales, bias)
    _vnni(num_rows, wide, tile)


@kernel
def score_keys(
    is_int8: bool,
    num_rows: int,
    q: int,
    k: int,
    k_panel_step: int,
    head_dim: int,
    zeros: int,
    scores: int,
    ahead: int,
    ahead_panel_step: int,
) -> None:
    """Computes the scores of two groups of keys: scores [num_rows, 32] = q k.

    Args:
        is_int8: whether keys are int8 or fp32.
        num_rows: 1 to MAX_ROWS.
        q: address of queries, [head_dim, num_rows].
        k: address of the first group, [head_dim, LANES].
        k_panel_step: bytes from there to the second group.
        head_dim: size of a head.
        zeros: address of 32 fp32 zeros.
        scores: address of the result.
        ahead, ahead_panel_step: k and k_panel_step of the next call.
    """
    b_step = LANES if is_int8 else 4 * LANES
    tile = Tile(q, k, b_step, k_panel_step, head_dim, zeros, 0, scores, 4 * 2 * LANES, ahead, ahead_panel_step)
    if is_int8:
        _int8_as_fp32(num_rows, False, tile)
    else:
        _fp32(num_rows, False, tile)


@kernel
def add_values(
    is_int8: bool,
    num_rows: int,
    wide: bool,
    weights: int,
    v: int,
    head_dim: int,
    num_keys: int,
    acc: int,
    acc_step: int,
    ahead: int,
) -> None:
    """Adds weighted values: acc += weights [num_rows, num_keys] v [num_keys, columns].

    Args:
        is_int8: whether values are int8 or fp32.
        num_rows, wide: as in `multiply_fp32`; wide adds 64 columns of the head, else 32.
        weights: address; rows lie WEIGHTS_STEP bytes apart.
        v: address of the columns in the first value; values are head_dim elements apart.
        head_dim: size of a head.
        num_keys: values to add, at least 1.
        acc: address of the columns in the first row.
        acc_step: bytes from row to row.
        ahead: v of a later call.
    """
    if is_int8:
        tile = Tile(weights, v, head_dim, LANES, num_keys, acc, acc_step, acc, acc_step, ahead, LANES)
        _values_int8(num_rows, wide, tile)
    else:
        step, panel_step = 4 * head_dim, 4 * LANES
        tile = Tile(weights, v, step, panel_step, num_keys, acc, acc_step, acc, acc_step, ahead, panel_step)
        _values_fp32(num_rows, wide, tile)
