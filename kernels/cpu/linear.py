"""Linear layers on weights packed for `multiply_tile`: fp32, bf16, fp16, int8 with one scale per output channel,
integers of 4 or 8 bits with a scale and an offset per group of inputs, or MXFP4.

A layer takes two instructions: PACK_ROWS lays the input out in tiles and quantises it if the weights are; LINEAR
multiplies. An item of LINEAR is some columns and up to BLOCK_TILES tiles of rows, which share one read of each panel of
weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from kernels.cpu.arrays import check_fp32, check_stored
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.instruction import FIRST_OPERAND, ROWS, SHARES, SHARES_PER_THREAD, Opcode, num_rows
from kernels.cpu.intrinsics import floats_at, longs_at, words_at
from kernels.cpu.jit import inline, kernel
from kernels.cpu.multiply_tile import (
    multiply_fp32,
    multiply_grouped,
    multiply_int8_weights,
    multiply_microscaled,
    multiply_two_byte_weights,
    multiply_vnni,
)
from kernels.cpu.quantize import quantize_row
from kernels.cpu.recording import Recording
from kernels.cpu.tile import LANES, MAX_ROWS
from kernels.grouped_weights import GroupedWeights
from kernels.microscaled_weights import GROUP_SIZE, MicroscaledWeights

if TYPE_CHECKING:
    from kernels.cpu.arrays import Longs

GROUP = 2 * LANES
"""Columns multiplied together; weights are padded to a multiple of it."""
_PACK_VALUES = 1 << 20
"""Weights packed at a time, so that packing needs little memory besides its result."""
BLOCK_TILES = 8
"""Tiles of rows in an item: 96 rows of 2,048 inputs fit into the L2 cache beside a panel of weights."""

_ZERO_POINT = 128  # VNNI takes activations as unsigned bytes

# operands of both instructions
X, X_STEP, _IN, _DEPTH, _KIND, _PACKED, _ROW_SCALES, _ORDER, X_ROWS = range(FIRST_OPERAND, FIRST_OPERAND + 9)
_WEIGHT, _OUT, _N, _START, _BIAS, _SCALES, _GROUP_SIZE = range(FIRST_OPERAND + 9, FIRST_OPERAND + 16)


class Kind(IntEnum):
    """Type of product: fp32 activations by weights of a type, or both of 8 bits."""

    FP32 = 0
    BF16_WEIGHTS = 1
    FP16_WEIGHTS = 2
    INT8_WEIGHTS = 3
    INT8 = 4
    GROUPS_OF_4_BITS = 5
    GROUPS_OF_8_BITS = 6
    MICROSCALED = 7


FLOAT_KINDS = {
    torch.float32: Kind.FP32,
    torch.bfloat16: Kind.BF16_WEIGHTS,
    torch.float16: Kind.FP16_WEIGHTS,
}
"""Kinds of the dtypes in which weights may be stored."""

_FP32, _BF16_WEIGHTS, _FP16_WEIGHTS = int(Kind.FP32), int(Kind.BF16_WEIGHTS), int(Kind.FP16_WEIGHTS)
_INT8_WEIGHTS, _INT8 = int(Kind.INT8_WEIGHTS), int(Kind.INT8)
_GROUPS_OF_4_BITS, _GROUPS_OF_8_BITS = int(Kind.GROUPS_OF_4_BITS), int(Kind.GROUPS_OF_8_BITS)
_MICROSCALED = int(Kind.MICROSCALED)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights of one layer, as the kernels read them. N is out_features, padded to a multiple of GROUP.

    Attributes:
        weight: floats, int8 or, in groups, uint8 [N / 16, in, 16]; int8 may be, four inputs side by side,
            [N / 16, in / 4, 16, 4]; 4 bits are [N / 16, in / 2, 16], the even input in the low half of the byte.
        start: [N], start of each sum: the bias in fp32, or an int32 that subtracts the zero point.
        bias: [N] fp32, zeros if there is none.
        scales: [N] fp32 of int8 weights; scales and offsets of groups, [N / 16, groups, 2, 16]; of MXFP4 the
            exponents, uint8 [N / 16, groups, 16].
        group_size: inputs of a group.
        input_order: [in] int64, the input that each row of B multiplies; None: their order.
    """

    in_features: int
    out_features: int
    kind: Kind
    weight: torch.Tensor
    start: torch.Tensor
    bias: torch.Tensor
    scales: torch.Tensor
    group_size: int = 0
    input_order: torch.Tensor | None = None

    @property
    def depth(self) -> int:
        """Words of a packed row of inputs: fp32, or four int8."""
        return -(-self.in_features // 4) if self.kind is Kind.INT8 else self.in_features


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, *, quantize: bool) -> PackedLinear:
    """Lays weights out for the kernels.

    Args:
        weight: [out, in] fp32, bf16 or fp16; stays in this type unless it is quantised.
        bias: [out], of the same types; widened to fp32.
        quantize: to int8, symmetric, one scale per output channel. CPUs without VNNI keep activations in fp32.
    Raises: ValueError: weight is of another type.
    """
    check_stored(weight=weight)
    num_out, num_in = weight.shape
    biases = _padded_bias(bias, num_out)
    if not quantize:
        panels = torch.empty(len(biases) // LANES, num_in, LANES, dtype=weight.dtype)
        write_float_panels(panels, weight)
        return PackedLinear(num_in, num_out, FLOAT_KINDS[weight.dtype], panels, biases, biases, torch.ones(len(biases)))
    packing = _Int8Packing(num_out, num_in, biases, has_int8_inputs=cpu_features().vnni)
    for begin, rows in _padded_rows(weight):
        exact = rows.float()
        largest = exact.abs().amax(dim=1)
        scales = torch.where(largest > 0, largest / 127, 1.0)
        packing.write(begin, (exact / scales[:, None]).round().to(torch.int8), scales)
    return packing.packed()


def pack_grouped(weights: GroupedWeights, bias: torch.Tensor | None, *, quantize: bool) -> PackedLinear:
    """Lays quantised weights of a checkpoint out for the kernels, with the values that they have.

    Args:
        weights: int8 with one scale per row becomes the form of `pack_linear`; all else is multiplied in groups.
        bias: [out], of any type; widened to fp32.
        quantize: whether inputs may be quantised to int8 even if the checkpoint is not meant for it.
    """
    num_out, num_in = weights.values.shape
    biases = _padded_bias(bias, num_out)
    if weights.is_int8_per_row:
        has_int8_inputs = cpu_features().vnni and (quantize or weights.quantizes_inputs)
        packing = _Int8Packing(num_out, num_in, biases, has_int8_inputs=has_int8_inputs)
        for (begin, rows), (_, scales) in zip(
            _padded_rows(weights.values, 128), _padded_rows(weights.scales, num_values=num_in), strict=True
        ):
            packing.write(begin, (rows.short() - 128).to(torch.int8), scales[:, 0])
        return packing.packed()
    num_panels, num_groups = len(biases) // LANES, weights.scales.shape[1]
    kind = {4: Kind.GROUPS_OF_4_BITS, 8: Kind.GROUPS_OF_8_BITS}[weights.num_bits]
    panels = torch.empty(num_panels, num_in * weights.num_bits // 8, LANES, dtype=torch.uint8)
    for begin, rows in _padded_rows(weights.values):
        cells = rows if weights.num_bits == 8 else rows[:, ::2] | rows[:, 1::2] << 4
        _write_panels(panels, begin, cells.view(-1, LANES, cells.shape[1]))
    factors = torch.empty(num_panels, num_groups, 2, LANES)
    for number, numbers in enumerate((weights.scales, weights.offsets)):
        for begin, rows in _padded_rows(numbers, num_values=num_in):
            _write_panels(factors[:, :, number], begin, rows.view(-1, LANES, num_groups))
    return PackedLinear(num_in, num_out, kind, panels, biases, biases, factors, weights.group_size, weights.input_order)


def pack_microscaled(weights: MicroscaledWeights, bias: torch.Tensor | None) -> PackedLinear:
    """Lays weights in MXFP4 out for the kernels.

    Args:
        weights: the matrix.
        bias: [out], of any type; widened to fp32.
    """
    num_out, num_in = weights.codes.shape[0], weights.in_features
    biases = _padded_bias(bias, num_out)
    num_panels, num_groups = len(biases) // LANES, weights.exponents.shape[1]
    panels = torch.empty(num_panels, num_in // 2, LANES, dtype=torch.uint8)
    for begin, rows in _padded_rows(weights.codes):
        _write_panels(panels, begin, rows.view(-1, LANES, num_in // 2))
    exponents = torch.empty(num_panels, num_groups, LANES, dtype=torch.uint8)
    for begin, rows in _padded_rows(weights.exponents, num_values=num_in):
        _write_panels(exponents, begin, rows.view(-1, LANES, num_groups))
    return PackedLinear(num_in, num_out, Kind.MICROSCALED, panels, biases, biases, exponents, GROUP_SIZE)


def _padded_bias(bias: torch.Tensor | None, num_out: int) -> torch.Tensor:
    biases = torch.zeros(num_out + -num_out % GROUP)
    if bias is not None:
        biases[:num_out] = bias
    return biases


def _padded_rows(
    matrix: torch.Tensor, padding: int = 0, *, num_values: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the first row and rows of a matrix, as many at a time as have _PACK_VALUES weights; all but the last are
    whole groups, which is padded to one.

    num_values: weights of a row, if the matrix holds something else for each row.
    """
    num_rows = max(GROUP, _PACK_VALUES // (num_values or matrix.shape[1]) // GROUP * GROUP)
    for begin in range(0, len(matrix), num_rows):
        rows = matrix[begin : begin + num_rows]
        yield begin, torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % GROUP), value=padding)


def write_float_panels(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Lays out weight [out, in] in panels [N / 16, in, 16] of the same type, N: out padded to a multiple of GROUP."""
    for begin, rows in _padded_rows(weight):
        _write_panels(panels, begin, rows.view(-1, LANES, weight.shape[1]))


def _write_panels(panels: torch.Tensor, begin: int, rows: torch.Tensor) -> None:
    """Writes rows [panels, LANES, cells] behind those before `begin`."""
    panels[begin // LANES : begin // LANES + len(rows)] = rows.transpose(1, 2)


class _Int8Packing:
    """Lays out int8 weights with one scale per row, some rows at a time."""

    def __init__(self, num_out: int, num_in: int, biases: torch.Tensor, *, has_int8_inputs: bool) -> None:
        self._num_out, self._num_in, self._biases = num_out, num_in, biases
        self._kind = Kind.INT8 if has_int8_inputs else Kind.INT8_WEIGHTS
        shape = (-(-num_in // 4), LANES, 4) if has_int8_inputs else (num_in, LANES)
        self._panels = torch.empty(len(biases) // LANES, *shape, dtype=torch.int8)
        self._start = torch.zeros(len(biases), dtype=torch.int32)
        self._scales = torch.ones(len(biases))

    def write(self, begin: int, rows: torch.Tensor, scales: torch.Tensor) -> None:
        """Writes rows [n, in] int8 and their scales [n]."""
        end = begin + len(rows)
        self._scales[begin:end] = scales
        if self._kind is Kind.INT8:
            self._start[begin:end] = rows.sum(dim=1, dtype=torch.int32) * -_ZERO_POINT
            rows = torch.nn.functional.pad(rows, (0, -self._num_in % 4)).view(-1, LANES, self._panels.shape[1], 4)
        else:
            rows = rows.view(-1, LANES, self._num_in)
        _write_panels(self._panels, begin, rows)

    def packed(self) -> PackedLinear:
        """Returns the layer."""
        return PackedLinear(
            self._num_in, self._num_out, self._kind, self._panels, self._start, self._biases, self._scales
        )


def emit_linear(recording: Recording, x: torch.Tensor, weights: PackedLinear) -> torch.Tensor:
    """Emits the two instructions of x [T, in] -> [T, out].

    Raises: ValueError: x is not fp32, or of another width.
    """
    check_fp32(x=x)
    if x.ndim != 2 or x.shape[1] != weights.in_features or x.stride(1) != 1:
        raise ValueError(f"x has shape {list(x.shape)}, strides {x.stride()}; the layer takes {weights.in_features}")
    packed, row_scales = recording.empty(x, weights.depth), recording.empty(x)
    out = recording.empty(x, weights.out_features)
    operands = linear_operands(x, weights, packed, row_scales, out)
    recording.emit(Opcode.PACK_ROWS, x, *operands)
    recording.emit(Opcode.LINEAR, x, *operands)
    recording.keep(weights)
    return out


def linear_operands(
    x: torch.Tensor, weights: PackedLinear, packed: torch.Tensor, row_scales: torch.Tensor, out: torch.Tensor
) -> tuple[int, ...]:
    """Returns the operands of both instructions of x [T, in] -> out [T, out].

    packed [T, depth] and row_scales [T] hold what PACK_ROWS makes of x.
    """
    return (
        x.data_ptr(), x.stride(0) * 4, weights.in_features, weights.depth, int(weights.kind),
        packed.data_ptr(), row_scales.data_ptr(), 0 if weights.input_order is None else weights.input_order.data_ptr(),
        0, weights.weight.data_ptr(), out.data_ptr(), weights.out_features,
        weights.start.data_ptr(), weights.bias.data_ptr(), weights.scales.data_ptr(), weights.group_size,
    )  # fmt: skip


@inline
def move_rows(row: "Longs", rows: int, begin: int) -> None:
    """Changes an instruction on all rows to one on those from `begin` on, as many as are at the address `rows`.

    The rows of x stay those that X and X_ROWS say.
    """
    row[ROWS] = rows
    row[_PACKED] += 4 * begin * row[_DEPTH]
    row[_ROW_SCALES] += 4 * begin
    row[_OUT] += 4 * begin * row[_N]


@inline
def _is_two_bytes(kind: int) -> bool:
    return _BF16_WEIGHTS <= kind <= _FP16_WEIGHTS


@inline
def _half_bytes(kind: int) -> int:
    """Returns the size of what B holds for a term of a sum, in halves of bytes."""
    if kind in (_GROUPS_OF_4_BITS, _MICROSCALED):
        return 1
    return 2 if kind in (_INT8_WEIGHTS, _GROUPS_OF_8_BITS) else 4 if _is_two_bytes(kind) else 8


@kernel
def _num_tiles(rows: int) -> int:
    return -(-rows // MAX_ROWS)


@kernel
def _is_packed(row: "Longs", rows: int) -> bool:
    """Tells whether the rows need no packing: a single fp32 row in the order of inputs is already packed."""
    return rows == 1 and row[_KIND] != _INT8 and row[_ORDER] == 0


@kernel
def num_pack_items(row: "Longs") -> int:
    """Returns the items of PACK_ROWS: one per tile, none if there is nothing to pack."""
    return num_pack_items_of(row, num_rows(row[ROWS]))


@kernel
def num_pack_items_of(row: "Longs", rows: int) -> int:
    """Returns the items of PACK_ROWS on this number of rows."""
    return 0 if _is_packed(row, rows) else _num_tiles(rows)


@kernel
def pack_item(row: "Longs", item: int, scratch: int) -> None:
    """Lays one tile of rows out as [depth, rows of the tile]; quantises it first if the product is of 8 bits."""
    rows = num_rows(row[ROWS])
    num_tiles = _num_tiles(rows)
    begin, end = item * rows // num_tiles, (item + 1) * rows // num_tiles
    height, depth, width = end - begin, row[_DEPTH], row[_IN]
    is_quantized = row[_KIND] == _INT8
    packed = words_at(row[_PACKED] + 4 * begin * depth, (depth, height))
    scales = floats_at(row[_ROW_SCALES], rows)
    for i in range(height):
        source = begin + i
        if row[X_ROWS]:
            source = longs_at(row[X_ROWS], end)[source]
        address = row[X] + source * row[X_STEP]
        if is_quantized:
            scales[begin + i] = quantize_row(floats_at(address, width), scratch, depth)
            address = scratch
        words = words_at(address, depth)
        if row[_ORDER]:
            order = longs_at(row[_ORDER], depth)
            for k in range(depth):
                packed[k, i] = words[order[k]]
        else:
            for k in range(depth):
                packed[k, i] = words[k]


@kernel
def num_linear_items(row: "Longs") -> int:
    """Returns the items of LINEAR: blocks of tiles times shares of the columns."""
    return num_linear_items_of(row, num_rows(row[ROWS]))


@kernel
def num_linear_items_of(row: "Longs", rows: int) -> int:
    """Returns the items of LINEAR on this number of rows."""
    num_blocks = -(-_num_tiles(rows) // BLOCK_TILES)
    return num_blocks * min(int(row[SHARES]), int(-(-row[_N] // GROUP)))


@kernel
def linear_item(row: "Longs", item: int, scratch: int) -> None:
    """Multiplies a block of tiles with some groups of columns, columns outermost."""
    rows = num_rows(row[ROWS])
    num_tiles, num_groups = _num_tiles(rows), -(-row[_N] // GROUP)
    num_shares = min(row[SHARES], num_groups)
    block, share = item // num_shares, item % num_shares
    first_tile, last_tile = block * BLOCK_TILES, min(num_tiles, (block + 1) * BLOCK_TILES)
    is_low = -(-rows // num_tiles) <= MAX_ROWS // 2  # then registers allow for twice the width
    first_group, end = share * num_groups // num_shares, (share + 1) * num_groups // num_shares
    group = first_group
    while group < end:
        num_wide = 2 if is_low and group + 2 <= end else 1
        for tile in range(first_tile, last_tile):
            begin, stop = tile * rows // num_tiles, (tile + 1) * rows // num_tiles
            following = group
            if tile == last_tile - 1:  # the next of this item, or of the item that this thread is likely to fetch next
                is_last = group + num_wide == end
                following = (
                    end + (row[SHARES] // SHARES_PER_THREAD - 1) * (end - first_group) if is_last else group + num_wide
                )
                following = min(following, num_groups - num_wide)
            _multiply(row, rows, begin, stop, group, num_wide, following, scratch)
        group += num_wide


@kernel
def _multiply(
    row: "Longs", rows: int, begin: int, end: int, group: int, num_wide: int, following: int, scratch: int
) -> None:
    """Multiplies rows begin:end with one or two groups of columns; prefetches the weights of the next group."""
    kind, depth, n = row[_KIND], row[_DEPTH], row[_N]
    height, wide, column = end - begin, num_wide == 2, group * GROUP
    width = num_wide * GROUP
    a = row[X] if _is_packed(row, rows) else row[_PACKED] + 4 * begin * depth
    group_bytes = GROUP * depth * _half_bytes(kind) // 2
    b, ahead = row[_WEIGHT] + group * group_bytes, row[_WEIGHT] + following * group_bytes
    start, bias, scales = row[_START] + 4 * column, row[_BIAS] + 4 * column, row[_SCALES] + 4 * column
    place, step = row[_OUT] + 4 * (begin * n + column), 4 * n
    is_whole = column + width <= n
    c, c_step = (place, step) if is_whole else (scratch, 4 * width)
    if kind == _FP32:
        multiply_fp32(height, wide, a, b, depth, start, 0, c, c_step, ahead)
    elif _is_two_bytes(kind):
        multiply_two_byte_weights(kind == _BF16_WEIGHTS, height, wide, a, b, depth, start, c, c_step, ahead)
    elif kind == _MICROSCALED:
        num_groups = depth // row[_GROUP_SIZE]
        factors = row[_SCALES] + num_groups * column
        multiply_microscaled(height, wide, a, b, num_groups, start, factors, c, c_step, ahead)
    elif kind >= _GROUPS_OF_4_BITS:
        num_groups = depth // row[_GROUP_SIZE]
        factors = row[_SCALES] + 8 * num_groups * column
        is_4_bits = kind == _GROUPS_OF_4_BITS
        size = row[_GROUP_SIZE]
        multiply_grouped(is_4_bits, height, wide, a, b, size, num_groups, start, factors, c, c_step, ahead)
    elif kind == _INT8_WEIGHTS:
        multiply_int8_weights(height, wide, a, b, depth, start, scales, bias, c, c_step, ahead)
    else:
        row_scales = row[_ROW_SCALES] + 4 * begin
        multiply_vnni(height, wide, a, b, depth, start, scales, row_scales, bias, c, c_step, ahead)
    if not is_whole:
        for i in range(height):
            floats_at(place + i * step, n - column)[:] = floats_at(c + i * c_step, n - column)
