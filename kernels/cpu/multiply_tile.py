"""The inner loop of all matrix products, of linear layers and attention, written in LLVM's vector instructions.

A tile is C[i, :] = C0[i, :] + sum over k of A[k, i] * B[k, :], i below MAX_ROWS, 32 or 64 columns wide, held in
registers for the whole sum. Each element is summed in the order of k with fused multiply-adds, so its bits depend
neither on the height of the tile nor on the thread. This makes the engine's results independent of the batch.

While a tile reads its B it prefetches the B of a later tile, so that computing and waiting for memory overlap.

Measured on one core of an EPYC 9005: 250 GFLOP/s fp32 and 1,000 GOP/s int8 from 12 rows on (python -m engine.bench
linear).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.intrinsics import emit_prefetch
from kernels.cpu.jit import kernel
from kernels.cpu.two_bytes import emit_bf16_to_fp32, emit_fp16_to_fp32

LANES = 16
"""Columns of a vector: one AVX-512 register, or several registers of other CPUs."""

MAX_ROWS = 12 if cpu_features().avx512 else 2
"""Rows of a tile of 32 columns: its sums and one row of B fill the registers."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_FMA = "llvm.fma.v16f32"
_BYTES, _SHORTS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(16), LANES)


_unpack_tuple: Any = cgutils.unpack_tuple  # untyped


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _broadcast(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, None))


def declared(builder: Any, name: str, vector: Any) -> Any:
    """Declares an LLVM function that maps three vectors to one."""
    get_or_insert_function: Any = cgutils.get_or_insert_function  # untyped
    return get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)


class _Fp32:
    """B is fp32."""

    cell, sums = _F32, _FLOATS
    has_row_scales = False

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return _load(builder, address, _FLOATS, 4)

    @staticmethod
    def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
        return builder.call(declared(builder, _FMA, _FLOATS), [a, b, total])


class _Int8AsFp32(_Fp32):
    """B is int8, A and the sums are fp32."""

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return builder.sitofp(builder.sext(_load(builder, address, _BYTES, 1), _INTS), _FLOATS)


class _Bf16AsFp32(_Fp32):
    """B is bf16, A and the sums are fp32."""

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return emit_bf16_to_fp32(builder, _load(builder, address, _SHORTS, 2))


class _Fp16AsFp32(_Fp32):
    """B is fp16, A and the sums are fp32."""

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return emit_fp16_to_fp32(builder, _load(builder, address, _SHORTS, 2))


class _Vnni:
    """A is four unsigned, B four signed bytes for each k; the sums are int32, and exact."""

    cell, sums = _I32, _INTS
    has_row_scales = True

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        return _load(builder, address, _INTS, 4)

    @staticmethod
    def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
        return builder.call(declared(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS), [total, a, b])


class _Tile(NamedTuple):
    """Where one tile reads and writes. Kernels see it at trace time only: its fields become registers.

    Attributes:
        a, b: addresses of A and B.
        b_step: bytes between rows of B.
        b_panel_step: bytes between vectors of one row of B.
        depth: terms of each sum, at least 1.
        c0, c0_step: address of the start of the sums, and bytes between its rows.
        c, c_step: address of the result, and bytes between its rows.
        ahead, ahead_panel_step: `b` and `b_panel_step` of a later tile.
        scales, row_scales, bias: addresses of fp32 factors and terms, where the tile is scaled.
    """

    a: int
    b: int
    b_step: int
    b_panel_step: int
    depth: int
    c0: int
    c0_step: int
    c: int
    c_step: int
    ahead: int
    ahead_panel_step: int
    scales: int = 0
    row_scales: int = 0
    bias: int = 0


@dataclass(frozen=True, slots=True)
class _TileKind:
    """What differs between the compiled tiles.

    Attributes:
        operands: types of A, B and the sums.
        num_vectors: columns of the tile / LANES.
        a_row_step: bytes between rows of A; None: A is packed, [depth, rows].
        is_scaled: C = sums * scales + bias, with scales of columns, and of rows where A is quantised.
    """

    operands: Any
    num_vectors: int
    a_row_step: int | None = None
    is_scaled: bool = False

    @property
    def max_rows(self) -> int:
        """Rows that fit the registers."""
        return MAX_ROWS * 2 // self.num_vectors


def _emit_tile(builder: Any, kind: _TileKind, num_rows: int, end: Any, tile: _Tile) -> None:
    """Emits the loop for one height; the fields of `tile` are LLVM values."""
    operands, num_vectors = kind.operands, kind.num_vectors
    entry, loop = builder.block, builder.append_basic_block(f"rows{num_rows}")
    stored = builder.append_basic_block(f"store{num_rows}")

    def at(base: Any, step: Any, row: int, vector: int) -> Any:
        offset = builder.add(builder.mul(step, _I64(row)), _I64(4 * LANES * vector))
        return builder.add(base, offset)

    start = [
        [_load(builder, at(tile.c0, tile.c0_step, i, v), operands.sums, 4) for v in range(num_vectors)]
        for i in range(num_rows)
    ]
    builder.branch(loop)

    builder.position_at_end(loop)
    k = builder.phi(_I64)
    k.add_incoming(_I64(0), entry)
    sums = [[builder.phi(operands.sums) for _ in row] for row in start]
    a_k = builder.add(tile.a, builder.mul(k, _I64(4 * num_rows if kind.a_row_step is None else 4)))
    b_k = builder.add(tile.b, builder.mul(k, tile.b_step))
    row_of_b = [
        operands.load_b(builder, builder.add(b_k, builder.mul(tile.b_panel_step, _I64(v)))) for v in range(num_vectors)
    ]
    ahead_k = builder.add(tile.ahead, builder.mul(k, tile.b_step))
    for v in range(num_vectors):
        emit_prefetch(builder, builder.add(ahead_k, builder.mul(tile.ahead_panel_step, _I64(v))))
    totals = []
    for i in range(num_rows):
        address = builder.add(a_k, _I64(i * (kind.a_row_step or 4)))
        cell = _broadcast(builder, _load(builder, address, operands.cell, 4), operands.sums)
        totals.append([operands.multiply_add(builder, cell, row_of_b[v], sums[i][v]) for v in range(num_vectors)])
    next_k = builder.add(k, _I64(1))
    k.add_incoming(next_k, loop)
    for i in range(num_rows):
        for v in range(num_vectors):
            sums[i][v].add_incoming(start[i][v], entry)
            sums[i][v].add_incoming(totals[i][v], loop)
    builder.cbranch(builder.icmp_signed("<", next_k, tile.depth), loop, stored)

    builder.position_at_end(stored)
    values = _scaled(builder, kind, totals, tile) if kind.is_scaled else totals
    for i in range(num_rows):
        for v in range(num_vectors):
            pointer = builder.inttoptr(at(tile.c, tile.c_step, i, v), values[i][v].type.as_pointer())
            builder.store(values[i][v], pointer).align = 4
    builder.branch(end)


def _scaled(builder: Any, kind: _TileKind, totals: Any, tile: _Tile) -> Any:
    """Converts sums of quantised values to fp32: sums * scales + bias."""

    def columns(address: Any) -> Any:
        places = [builder.add(address, _I64(4 * LANES * v)) for v in range(kind.num_vectors)]
        return [_load(builder, place, _FLOATS, 4) for place in places]

    factors, biases, values = columns(tile.scales), columns(tile.bias), []
    for i, row in enumerate(totals):
        if kind.operands.has_row_scales:
            row = [builder.sitofp(total, _FLOATS) for total in row]
            scale = _broadcast(builder, _load(builder, builder.add(tile.row_scales, _I64(4 * i)), _F32, 4), _FLOATS)
            row_factors = [builder.fmul(scale, factor) for factor in factors]
        else:
            row_factors = factors
        # an explicit fma: the compiler may or may not fuse a separate product and sum
        terms = zip(row, row_factors, biases, strict=True)
        values.append([builder.call(declared(builder, _FMA, _FLOATS), term) for term in terms])
    return values


def _intrinsic(operands: Any, a_row_step: int | None = None, *, is_scaled: bool = False) -> Any:
    """Returns an intrinsic that computes a tile of any height and either width: multiply(num_rows, wide, tile)."""
    narrow, wide = (_TileKind(operands, num_vectors, a_row_step, is_scaled) for num_vectors in (2, 4))

    def multiply(_typing_context: Any, _num_rows: Any, _wide: Any, tile: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            fields = _unpack_tuple(builder, args[2])
            values = _Tile(*(context.cast(builder, *field, types.int64) for field in zip(fields, tile, strict=True)))
            is_wide = builder.zext(args[1], _I64)
            end = builder.append_basic_block("end")
            choice = builder.switch(builder.add(builder.mul(args[0], _I64(2)), is_wide), end)
            for kind in (narrow, wide):
                for height in range(1, kind.max_rows + 1):
                    block = builder.append_basic_block()
                    choice.add_case(_I64(2 * height + (kind is wide)), block)
                    builder.position_at_end(block)
                    _emit_tile(builder, kind, height, end, values)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(types.int64, types.boolean, tile), codegen

    return intrinsic(multiply)


WEIGHTS_STEP = 4 * 2 * LANES
"""Bytes from row to row of the weights in `add_values`."""

_fp32, _int8_as_fp32 = _intrinsic(_Fp32), _intrinsic(_Int8AsFp32)
_bf16_weights, _fp16_weights = _intrinsic(_Bf16AsFp32), _intrinsic(_Fp16AsFp32)
_int8_weights = _intrinsic(_Int8AsFp32, is_scaled=True)
_vnni = _intrinsic(_Vnni if cpu_features().vnni else _Int8AsFp32, is_scaled=True)  # unused without VNNI, but compiled
_values_fp32, _values_int8 = _intrinsic(_Fp32, WEIGHTS_STEP), _intrinsic(_Int8AsFp32, WEIGHTS_STEP)


@kernel
def multiply_fp32(
    num_rows: int, wide: bool, a: int, b: int, depth: int, c0: int, c: int, c_step: int, ahead: int
) -> None:
    """Computes one tile of a linear layer, all fp32: C = c0 + A B.

    Args:
        num_rows: 1 to MAX_ROWS, or to MAX_ROWS // 2 if wide.
        wide: 64 columns instead of 32.
        a: address of A, [depth, num_rows].
        b: address of B, [columns / LANES, depth, LANES].
        depth: terms of each sum, at least 1.
        c0: address of the row that each sum starts from.
        c: address of the first row of C.
        c_step: bytes from row to row of C.
        ahead: b of a later call, prefetched while this one is read.
    """
    step, panel_step = 4 * LANES, 4 * LANES * depth
    tile = _Tile(a, b, step, panel_step, depth, c0, 0, c, c_step, ahead, panel_step)
    _fp32(num_rows, wide, tile)


@kernel
def multiply_two_byte_weights(
    is_bf16: bool, num_rows: int, wide: bool, a: int, b: int, depth: int, c0: int, c: int, c_step: int, ahead: int
) -> None:
    """As `multiply_fp32`, with B of bf16, or else of fp16: the same bits as with B widened to fp32 in memory."""
    step, panel_step = 2 * LANES, 2 * LANES * depth
    tile = _Tile(a, b, step, panel_step, depth, c0, 0, c, c_step, ahead, panel_step)
    if is_bf16:
        _bf16_weights(num_rows, wide, tile)
    else:
        _fp16_weights(num_rows, wide, tile)


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
    tile = _Tile(a, b, step, panel_step, depth, start, 0, c, c_step, ahead, panel_step, scales, 0, bias)
    _int8_weights(num_rows, wide, tile)


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
    tile = _Tile(a, b, step, panel_step, depth, start, 0, c, c_step, ahead, panel_step, scales, row_scales, bias)
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
    tile = _Tile(q, k, b_step, k_panel_step, head_dim, zeros, 0, scores, 4 * 2 * LANES, ahead, ahead_panel_step)
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
        tile = _Tile(weights, v, head_dim, LANES, num_keys, acc, acc_step, acc, acc_step, ahead, LANES)
        _values_int8(num_rows, wide, tile)
    else:
        step, panel_step = 4 * head_dim, 4 * LANES
        tile = _Tile(weights, v, step, panel_step, num_keys, acc, acc_step, acc, acc_step, ahead, panel_step)
        _values_fp32(num_rows, wide, tile)
