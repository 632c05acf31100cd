"""The inner loop of all matrix products, of linear layers and attention, written in LLVM's vector instructions.

A tile is C[i, :] = C0[i, :] + sum over k of A[k, i] * B[k, :], i below MAX_ROWS, 32 or 64 columns wide, held in
registers for the whole sum; without AVX-512 only some of its columns at a time. Each element is summed in the order of
k with fused multiply-adds, so its bits depend neither on the height of the tile nor on the thread. This makes the
engine's results independent of the batch.

While a tile reads its B it prefetches the B of a later tile, so that computing and waiting for memory overlap.

Measured on one core of an EPYC 9005: 250 GFLOP/s fp32 and 1,000 GOP/s int8 from 12 rows on (python -m engine.bench
linear).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.cpu_features import ByteProducts, cpu_features
from kernels.cpu.intrinsics import emit_call, emit_prefetch

LANES = 16
"""Columns of a vector: one AVX-512 register, or several registers of other CPUs."""

_IS_OLD = cpu_features().byte_products is ByteProducts.GENERIC  # x86-64 before AVX2, with registers of four numbers

MAX_ROWS = 12 if cpu_features().avx512 else 2 if _IS_OLD else 6
"""Rows of a tile of 32 columns: sums and a row of B fill the registers, of 16 columns at a time without AVX-512."""


def max_rows(*, has_group_sums: bool) -> int:
    """Returns the rows of a tile of 32 columns, in which each sum may have a second one of its group."""
    return MAX_ROWS // 2 if has_group_sums else MAX_ROWS


_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_FMA = "llvm.fma.v16f32"
BYTES = ir.VectorType(ir.IntType(8), LANES)


_unpack_tuple: Any = cgutils.unpack_tuple  # untyped


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """Emits a load of a value of an LLVM type."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def broadcast(builder: Any, scalar: Any) -> Any:
    """Emits a vector of equal values."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, None))


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emits a * b + c, rounded once: the compiler may or may not fuse a separate product and sum."""
    return emit_call(builder, _FMA, FLOATS, a, b, c)


class Operands:
    """Types of A, B and the sums, and how they are multiplied.

    Attributes:
        cell: what A holds for each k.
        sums: a vector of sums.
        group_sums: a vector of the sums of a group, if these have another type; `add_group` adds them to the others.
        terms: rows of B of a step.
        together: how many of them a row of A multiplies before the next row does. They should fit into registers: six
            rows take 1.3 times as long with all eight of 4 bits as with one. Twelve rows of 8 bits take 1.07 times as
            long with one as with four.
        has_planes: whether B has bits above its steps in another plane (`Planes`).
        has_row_scales: whether rows of A have scales, applied to the sums.
        has_groups: whether groups of k have factors, which `load_terms` applies to B.
        factor_bytes: of the factors of a group, for each panel.
    """

    cell: Any
    sums: Any
    group_sums: Any = None
    terms = 1
    together = 4
    has_planes = False
    has_row_scales = False
    has_groups = False
    factor_bytes = 2 * 4 * LANES

    @classmethod
    def load_terms(cls, builder: Any, address: Any, _factors: Any, _planes: "Planes | None") -> Iterator[Any]:
        """Yields a vector of each of the `terms` rows of B of the step at an address.

        Each is made shortly before it is multiplied, so that few take registers.
        """
        yield cls.load_b(builder, address)

    @staticmethod
    def load_factors(builder: Any, address: Any, _tile: "Tile", _vector: int) -> Any:
        """Loads the factors of a group for a vector of columns: a vector of scales, and one of offsets."""
        return [load(builder, builder.add(address, _I64(offset)), FLOATS, 4) for offset in (0, 4 * LANES)]

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        """Loads a vector of B."""
        raise NotImplementedError

    @staticmethod
    def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
        """Returns total + a * b."""
        raise NotImplementedError

    @staticmethod
    def add_group(builder: Any, total: Any, group_sum: Any, factors: Any, row_factors: Any) -> Any:
        """Returns total plus the sum of a group by its factors, and by the scale and the scaled sum of a row of A."""
        raise NotImplementedError


class Fp32Operands(Operands):
    """All are fp32."""

    cell, sums = _F32, FLOATS

    @staticmethod
    def load_b(builder: Any, address: Any) -> Any:
        """Loads 16 floats."""
        return load(builder, address, FLOATS, 4)

    @staticmethod
    def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
        """Rounds once."""
        return emit_fma(builder, a, b, total)


class Planes(NamedTuple):
    """Where the bits above the low four of a step of B are: LLVM values.

    Attributes:
        offset: bytes from the step to a vector of these bits, whose words have those of other steps too.
        shift: bits of other steps before them, in each half of a byte.
        num_high: how many there are of an integer.
    """

    offset: Any
    shift: Any
    num_high: Any


class Tile(NamedTuple):
    """Where one tile reads and writes. Kernels see it at trace time only: its fields become registers.

    Attributes:
        a, b: addresses of A and B.
        b_step: bytes between steps of B.
        b_panel_step: bytes between vectors of one row of B.
        depth: steps of each sum, or of each group in it, of `Operands.terms`; at least 1.
        c0, c0_step: address of the start of the sums, and bytes between its rows.
        c, c_step: address of the result, and bytes between its rows.
        ahead, ahead_panel_step: `b` and `b_panel_step` of a later tile.
        scales, row_scales, bias: addresses of fp32 factors and terms, where the tile is scaled. With sums of groups,
            row_scales are [groups, 2, rows]: scales of rows of A, and sums of rows times these. Factors of 4-bit
            floats are times these scales.
        num_groups: groups of `depth`, where B has factors of groups.
        factors: address of these, `Operands.factor_bytes` for each panel and group.
        num_high, plane_bytes: bits of an integer above the low four, and bytes of the plane of these four that is
            before them.
        has_e4m3: whether factors of 4-bit floats are E4M3; otherwise they are exponents.
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
    num_groups: int = 1
    factors: int = 0
    num_high: int = 0
    plane_bytes: int = 0
    has_e4m3: int = 0


@dataclass(frozen=True, slots=True)
class TileKind:
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
        """Rows that fit the registers; sums of groups take as many as other sums."""
        return max_rows(has_group_sums=self.operands.group_sums is not None) * 2 // self.num_vectors

    def vectors_at_once(self, num_rows: int) -> int:
        """Returns how many vectors of columns are summed together: as many as registers have room for."""
        if cpu_features().avx512:
            return self.num_vectors
        num_sums = num_rows if self.operands.group_sums is None else 2 * num_rows
        return min(self.num_vectors, max(1, 4 // num_sums))


def _emit_tile(builder: Any, kind: TileKind, num_rows: int, end: Any, tile: Tile) -> None:
    """Emits the loops for one height; the fields of `tile` are LLVM values."""
    at_once = kind.vectors_at_once(num_rows)
    for first in range(0, kind.num_vectors, at_once):
        _emit_columns(builder, replace(kind, num_vectors=at_once), num_rows, _from_vector(builder, kind, tile, first))
    builder.branch(end)


def _from_vector(builder: Any, kind: TileKind, tile: Tile, first: int) -> Tile:
    """Returns where the columns of a tile from a vector on are."""
    if first == 0:
        return tile

    def moved(address: Any, *factors: Any) -> Any:
        offset = _I64(first)
        for factor in factors:
            offset = builder.mul(offset, factor)
        return builder.add(address, offset)

    columns = {name: moved(getattr(tile, name), _I64(4 * LANES)) for name in ("c0", "c", "scales", "bias")}
    return tile._replace(
        **columns,
        b=moved(tile.b, tile.b_panel_step),
        ahead=moved(tile.ahead, tile.ahead_panel_step),
        factors=moved(tile.factors, tile.num_groups, _I64(kind.operands.factor_bytes)),
    )


def _emit_columns(builder: Any, kind: TileKind, num_rows: int, tile: Tile) -> None:
    """Emits the loop over some columns, from registers to memory."""

    def at(base: Any, step: Any, row: int, vector: int) -> Any:
        offset = builder.add(builder.mul(step, _I64(row)), _I64(4 * LANES * vector))
        return builder.add(base, offset)

    start = [
        [load(builder, at(tile.c0, tile.c0_step, i, v), kind.operands.sums, 4) for v in range(kind.num_vectors)]
        for i in range(num_rows)
    ]
    if kind.operands.has_groups:
        totals = _emit_groups(builder, kind, tile, start)
    else:
        totals = _emit_terms(builder, kind, tile, start, _I64(0), tile.depth, [None] * kind.num_vectors)
    values = _scaled(builder, kind, totals, tile) if kind.is_scaled else totals
    for i in range(num_rows):
        for v in range(kind.num_vectors):
            pointer = builder.inttoptr(at(tile.c, tile.c_step, i, v), values[i][v].type.as_pointer())
            builder.store(values[i][v], pointer).align = 4


def _emit_groups(builder: Any, kind: TileKind, tile: Tile, start: Any) -> Any:
    """Emits the loop over groups; returns the sums."""
    entry, loop, summed = builder.block, builder.append_basic_block(), builder.append_basic_block()
    operands = kind.operands
    panel_bytes = builder.mul(tile.num_groups, _I64(operands.factor_bytes))
    builder.branch(loop)

    builder.position_at_end(loop)
    group = builder.phi(_I64)
    group.add_incoming(_I64(0), entry)
    sums = _phis(builder, start)
    address = builder.add(tile.factors, builder.mul(group, _I64(operands.factor_bytes)))
    factors = [
        operands.load_factors(builder, builder.add(address, builder.mul(panel_bytes, _I64(v))), tile, v)
        for v in range(kind.num_vectors)
    ]
    first = builder.mul(group, tile.depth)
    last = builder.add(first, tile.depth)
    if operands.group_sums is None:
        totals = _emit_terms(builder, kind, tile, sums, first, last, factors)
    else:
        zero = ir.Constant(operands.group_sums, None)
        of_group = _emit_terms(builder, kind, tile, [[zero] * kind.num_vectors] * len(start), first, last, factors)
        totals = _emit_add_groups(builder, operands, tile, group, sums, of_group, factors)
    following = builder.add(group, _I64(1))
    group.add_incoming(following, builder.block)
    _add_incoming(sums, [(start, entry), (totals, builder.block)])
    builder.cbranch(builder.icmp_signed("<", following, tile.num_groups), loop, summed)

    builder.position_at_end(summed)
    return totals


def _emit_add_groups(
    builder: Any, operands: Any, tile: Tile, group: Any, sums: Any, of_group: Any, factors: Any
) -> Any:
    """Adds the sums of a group to those before, [rows][vectors]."""
    num_rows = len(sums)
    place = builder.add(tile.row_scales, builder.mul(group, _I64(2 * 4 * num_rows)))
    totals = []
    for i in range(num_rows):
        addresses = (builder.add(place, _I64(4 * (i + num_rows * number))) for number in range(2))
        row_factors = [broadcast(builder, load(builder, address, _F32, 4)) for address in addresses]
        terms = zip(sums[i], of_group[i], factors, strict=True)
        totals.append([operands.add_group(builder, *vectors, row_factors) for vectors in terms])
    return totals


def _emit_terms(builder: Any, kind: TileKind, tile: Tile, start: Any, first: Any, last: Any, factors: Any) -> Any:
    """Emits the loop over steps from first until last; returns the sums.

    start: sums before, [rows][vectors].
    factors: of the group, for each vector.
    """
    operands, num_vectors, num_rows = kind.operands, kind.num_vectors, len(start)
    entry, loop, summed = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)

    builder.position_at_end(loop)
    k = builder.phi(_I64)
    k.add_incoming(first, entry)
    sums = _phis(builder, start)
    row_bytes = 4 * num_rows if kind.a_row_step is None else 4
    a_k = builder.add(tile.a, builder.mul(k, _I64(row_bytes * operands.terms)))
    offset = builder.mul(k, tile.b_step)
    b_k = builder.add(tile.b, offset)
    planes = _planes(builder, tile, k, offset) if operands.has_planes else None
    vectors = [builder.add(b_k, builder.mul(tile.b_panel_step, _I64(v))) for v in range(num_vectors)]
    ahead_k = builder.add(tile.ahead, offset)
    for v in range(num_vectors):
        ahead = builder.add(ahead_k, builder.mul(tile.ahead_panel_step, _I64(v)))
        emit_prefetch(builder, ahead)
        if planes is not None:
            emit_prefetch(builder, builder.add(ahead, planes.offset))
    totals = [list(row) for row in sums]
    terms = enumerate(zip(*map(operands.load_terms, repeat(builder), vectors, factors, repeat(planes)), strict=True))
    while together := list(islice(terms, operands.together)):
        for i, row in enumerate(totals):
            for term, row_of_b in together:
                address = builder.add(a_k, _I64(i * (kind.a_row_step or 4) + row_bytes * term))
                cell = broadcast(builder, load(builder, address, operands.cell, 4))
                row[:] = [operands.multiply_add(builder, cell, *each) for each in zip(row_of_b, row, strict=True)]
    following = builder.add(k, _I64(1))
    k.add_incoming(following, loop)
    _add_incoming(sums, [(start, entry), (totals, loop)])
    builder.cbranch(builder.icmp_signed("<", following, last), loop, summed)

    builder.position_at_end(summed)
    return totals


def _planes(builder: Any, tile: Tile, k: Any, offset: Any) -> Planes:
    """Emits where the high bits of step k are; a word of them has four bits for each half of a byte."""
    place = builder.mul(k, tile.num_high)
    above = builder.add(tile.plane_bytes, builder.mul(builder.lshr(place, _I64(2)), _I64(4 * LANES)))
    return Planes(builder.sub(above, offset), builder.and_(place, _I64(3)), tile.num_high)


def _phis(builder: Any, start: Any) -> Any:
    return [[builder.phi(value.type) for value in row] for row in start]


def _add_incoming(phis: Any, sources: Any) -> None:
    """Adds the values of [rows][vectors] that come from blocks, given as (values, block)."""
    for values, block in sources:
        for phi_row, row in zip(phis, values, strict=True):
            for phi, value in zip(phi_row, row, strict=True):
                phi.add_incoming(value, block)


def _scaled(builder: Any, kind: TileKind, totals: Any, tile: Tile) -> Any:
    """Converts sums of quantised values to fp32: sums * scales + bias."""

    def columns(address: Any) -> Any:
        places = [builder.add(address, _I64(4 * LANES * v)) for v in range(kind.num_vectors)]
        return [load(builder, place, FLOATS, 4) for place in places]

    factors, biases, values = columns(tile.scales), columns(tile.bias), []
    for i, row in enumerate(totals):
        if kind.operands.has_row_scales:
            row = [builder.sitofp(total, FLOATS) for total in row]
            scale = broadcast(builder, load(builder, builder.add(tile.row_scales, _I64(4 * i)), _F32, 4))
            row_factors = [builder.fmul(scale, factor) for factor in factors]
        else:
            row_factors = factors
        values.append([emit_fma(builder, *terms) for terms in zip(row, row_factors, biases, strict=True)])
    return values


def tile_intrinsic(operands: Any, a_row_step: int | None = None, *, is_scaled: bool = False) -> Any:
    """Returns an intrinsic that computes a tile of any height and either width: multiply(num_rows, wide, tile).

    operands: None: it is never called, because this CPU lacks the instructions, and compiles to nothing.
    """
    widths = [] if operands is None else [2, 4]
    kinds = [TileKind(operands, num_vectors, a_row_step, is_scaled) for num_vectors in widths]

    def multiply(_typing_context: Any, _num_rows: Any, _wide: Any, tile: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            fields = _unpack_tuple(builder, args[2])
            given = Tile(*(context.cast(builder, *field, types.int64) for field in zip(fields, tile, strict=True)))
            values = Tile(*(_I64(field) if isinstance(field, int) else field for field in given))
            is_wide = builder.zext(args[1], _I64)
            end = builder.append_basic_block("end")
            choice = builder.switch(builder.add(builder.mul(args[0], _I64(2)), is_wide), end)
            for kind in kinds:
                for height in range(1, kind.max_rows + 1):
                    block = builder.append_basic_block()
                    choice.add_case(_I64(2 * height + (kind.num_vectors == 4)), block)
                    builder.position_at_end(block)
                    _emit_tile(builder, kind, height, end, values)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(types.int64, types.boolean, tile), codegen

    return intrinsic(multiply)
