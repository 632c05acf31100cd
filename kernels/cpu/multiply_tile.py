"""The matrix products of linear layers and of attention, each one tile at a time (`kernels.cpu.tile`)."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from kernels.cpu.byte_products import emit_byte_products
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.intrinsics import emit_call
from kernels.cpu.jit import kernel
from kernels.cpu.tile import (
    BYTES,
    FLOATS,
    INTS,
    LANES,
    Fp32Operands,
    Operands,
    Tile,
    load,
    tile_intrinsic,
)
from kernels.cpu.two_bytes import emit_bf16_to_fp32, emit_fp16_to_fp32

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


class _Bytes(Operands):
    """A is four unsigned, B four signed bytes for each k; the sums are int32, and exact."""

    cell, sums = _I32, INTS
    has_row_scales = True

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return load(builder, address, INTS, 4)

    @staticmethod
    def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
        return emit_byte_products(builder, total, a, b)


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
        return emit_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, a, b)


WEIGHTS_STEP = 4 * 2 * LANES
"""Bytes from row to row of the weights in `add_values`."""

_fp32, _int8_as_fp32 = tile_intrinsic(Fp32Operands), tile_intrinsic(_Int8AsFp32)
_bf16_weights, _fp16_weights = tile_intrinsic(_Bf16AsFp32), tile_intrinsic(_Fp16AsFp32)
_int8_weights = tile_intrinsic(_Int8AsFp32, is_scaled=True)
_bytes = tile_intrinsic(_Bytes, is_scaled=True)
_bf16_pairs = tile_intrinsic(_Bf16Pairs if cpu_features().bf16 else None)
_values_fp32, _values_bf16, _values_int8 = (
    tile_intrinsic(kind, WEIGHTS_STEP) for kind in (Fp32Operands, _Bf16AsFp32, _Int8AsFp32)
)


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
def multiply_int8(
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

    Args:
        start: address of one int32 for each column.
        scales, bias: addresses of one fp32 for each column.
        row_scales: address of one fp32 for each row; a column's and a row's scale are multiplied first.
    """
    step, panel_step = 4 * LANES, 4 * LANES * depth
    tile = Tile(a, b, step, panel_step, depth, start, 0, c, c_step, ahead, panel_step, scales, row_scales, bias)
    _bytes(num_rows, wide, tile)


@kernel
def score_keys(
    size: int,
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
        size: bytes of an element of a key: int8, bf16 or fp32.
        num_rows: 1 to MAX_ROWS.
        q: address of queries, [head_dim, num_rows].
        k: address of the first group, [head_dim, LANES].
        k_panel_step: bytes from there to the second group.
        head_dim: size of a head.
        zeros: address of 32 fp32 zeros.
        scores: address of the result.
        ahead, ahead_panel_step: k and k_panel_step of the next call.
    """
    tile = Tile(q, k, size * LANES, k_panel_step, head_dim, zeros, 0, scores, 4 * 2 * LANES, ahead, ahead_panel_step)
    if size == 1:
        _int8_as_fp32(num_rows, False, tile)
    elif size == 2:
        _bf16_weights(num_rows, False, tile)
    else:
        _fp32(num_rows, False, tile)


@kernel
def add_values(
    size: int,
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
        size: bytes of an element of a value: int8, bf16 or fp32.
        num_rows, wide: as in `multiply_fp32`; wide adds 64 columns of the head, else 32.
        weights: address; rows lie WEIGHTS_STEP bytes apart.
        v: address of the columns in the first value; values are head_dim elements apart.
        head_dim: size of a head.
        num_keys: values to add, at least 1.
        acc: address of the columns in the first row.
        acc_step: bytes from row to row.
        ahead: v of a later call.
    """
    step, panel_step = size * head_dim, size * LANES
    tile = Tile(weights, v, step, panel_step, num_keys, acc, acc_step, acc, acc_step, ahead, panel_step)
    if size == 1:
        _values_int8(num_rows, wide, tile)
    elif size == 2:
        _values_bf16(num_rows, wide, tile)
    else:
        _values_fp32(num_rows, wide, tile)
