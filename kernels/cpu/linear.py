"""Instructions of linear layers. A layer takes two: PACK_ROWS lays the input out in tiles, in the type of the product;
LINEAR multiplies. An item of LINEAR is some columns and tiles of up to BLOCK_ROWS rows, which share one read of each
panel of weights.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.cpu.arrays import check_fp32
from kernels.cpu.group_factors import CODE_BYTES, FACTORS, MAX_EXPANDED, UNIT_BYTES, expand_factors
from kernels.cpu.instruction import FIRST_OPERAND, ROWS, SHARES, Opcode, item_kernel, num_rows
from kernels.cpu.intrinsics import floats_at, longs_at, words_at
from kernels.cpu.jit import inline, kernel, spliced
from kernels.cpu.multiply_groups import multiply_grouped, multiply_int8_by_groups, multiply_microscaled
from kernels.cpu.multiply_tile import (
    multiply_bf16,
    multiply_fp32,
    multiply_int8,
    multiply_int8_weights,
    multiply_two_byte_weights,
)
from kernels.cpu.packed_linear import GROUP, Kind, PackedLinear
from kernels.cpu.quantize import pack_groups, quantize_row
from kernels.cpu.recording import Recording
from kernels.cpu.tile import LANES, MAX_ROWS, max_rows
from kernels.cpu.two_bytes import round_row_to_bf16

if TYPE_CHECKING:
    from kernels.cpu.arrays import Longs

BLOCK_ROWS = 96
"""Rows of an item: with 2,048 inputs they fit into the L2 cache beside a panel of weights."""

# operands of both instructions
X, X_STEP, _IN, _DEPTH, _KIND, _PACKED, _ROW_SCALES, _ORDER, X_ROWS = range(FIRST_OPERAND, FIRST_OPERAND + 9)
_WEIGHT, _OUT, _N, _START, _BIAS, _SCALES, _GROUP_SIZE = range(FIRST_OPERAND + 9, FIRST_OPERAND + 16)
_FACTORS_FORM, _CODES, _NUM_UNITS, _ZERO, _NUM_BITS = range(FIRST_OPERAND + 16, FIRST_OPERAND + 21)

_FP32, _BF16_WEIGHTS, _FP16_WEIGHTS = int(Kind.FP32), int(Kind.BF16_WEIGHTS), int(Kind.FP16_WEIGHTS)
_INT8_WEIGHTS, _INT8 = int(Kind.INT8_WEIGHTS), int(Kind.INT8)
_MICROSCALED, _NVFP4, _BF16 = int(Kind.MICROSCALED), int(Kind.NVFP4), int(Kind.BF16)
_GROUPS, _INT8_BY_GROUPS = int(Kind.GROUPS), int(Kind.INT8_BY_GROUPS)
_MAX_ROWS_OF_GROUPS = max_rows(has_group_sums=True)


def emit_linear(recording: Recording, x: torch.Tensor, weights: PackedLinear) -> torch.Tensor:
    """Emits the two instructions of x [T, in] -> [T, out].

    Raises: ValueError: x is not fp32, or of another width.
    """
    check_fp32(x=x)
    if x.ndim != 2 or x.shape[1] != weights.in_features or x.stride(1) != 1:
        raise ValueError(f"x has shape {list(x.shape)}, strides {x.stride()}; the layer takes {weights.in_features}")
    packed, row_scales = recording.empty(x, weights.depth), recording.empty(x, weights.num_row_factors)
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

    packed [T, depth] and row_scales [T, num_row_factors] hold what PACK_ROWS makes of x.
    """
    return (
        x.data_ptr(), x.stride(0) * 4, weights.in_features, weights.depth, int(weights.kind),
        packed.data_ptr(), row_scales.data_ptr(), 0 if weights.input_order is None else weights.input_order.data_ptr(),
        0, weights.weight.data_ptr(), out.data_ptr(), weights.out_features,
        weights.start.data_ptr(), weights.bias.data_ptr(), weights.scales.data_ptr(), weights.group_size,
        int(weights.factors_form), 0 if weights.codes is None else weights.codes.data_ptr(),
        weights.scales.shape[1] if weights.scales.ndim == 4 else 0, weights.zero_point, weights.num_bits,
    )  # fmt: skip


def set_row_operands(
    table: "Longs", x: torch.Tensor, packed: torch.Tensor, row_scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Sets those of `linear_operands` that do not depend on the weights, in instructions [n, WIDTH]."""
    table[:, X], table[:, X_STEP] = x.data_ptr(), x.stride(0) * 4
    table[:, _PACKED], table[:, _ROW_SCALES], table[:, _OUT] = packed.data_ptr(), row_scales.data_ptr(), out.data_ptr()


@inline
def move_rows(row: "Longs", rows: int, begin: int) -> None:
    """Changes an instruction on all rows to one on those from `begin` on, as many as are at the address `rows`.

    The rows of x stay those that X and X_ROWS say.
    """
    row[ROWS] = rows
    row[_PACKED] += 4 * begin * row[_DEPTH]
    row[_ROW_SCALES] += 4 * begin * _num_row_factors(row)
    row[_OUT] += 4 * begin * row[_N]


@inline
def _has_int8_by_groups(row: "Longs") -> bool:
    return bool(row[_KIND] == _INT8_BY_GROUPS)


@inline
def _num_row_factors(row: "Longs") -> int:
    """Returns numbers of a row in _ROW_SCALES."""
    return 2 * (row[_IN] // row[_GROUP_SIZE]) if _has_int8_by_groups(row) else 1


@inline
def _max_rows(row: "Longs") -> int:
    """Returns the rows of a tile."""
    return _MAX_ROWS_OF_GROUPS if _has_int8_by_groups(row) else MAX_ROWS


@inline
def _is_two_bytes(kind: int) -> bool:
    return _BF16_WEIGHTS <= kind <= _FP16_WEIGHTS


@inline
def _word_bits(row: "Longs") -> int:
    """Returns the bits that B holds for a word of a packed row of inputs."""
    kind, num_bits = row[_KIND], row[_NUM_BITS]
    if kind == _GROUPS:
        return int(num_bits)
    if kind == _INT8_BY_GROUPS:
        return int(4 * num_bits)
    if kind in (_MICROSCALED, _NVFP4):
        return 4
    if kind == _INT8_WEIGHTS:
        return 8
    return 16 if _is_two_bytes(kind) else 32


@inline
def _num_tiles(row: "Longs", rows: int) -> int:
    return -(-rows // _max_rows(row))


@kernel
def _is_packed(row: "Longs", rows: int) -> bool:
    """Tells whether the rows need no packing: a single fp32 row in the order of inputs is already packed."""
    is_rounded = row[_KIND] == _INT8 or row[_KIND] == _BF16 or _has_int8_by_groups(row)
    return rows == 1 and not is_rounded and row[_ORDER] == 0


@kernel
def num_pack_items(row: "Longs") -> int:
    """Returns the items of PACK_ROWS: one per tile, none if there is nothing to pack."""
    return num_pack_items_of(row, num_rows(row[ROWS]))


@kernel
def num_pack_items_of(row: "Longs", rows: int) -> int:
    """Returns the items of PACK_ROWS on this number of rows."""
    return 0 if _is_packed(row, rows) else _num_tiles(row, rows)


@item_kernel
def pack_item(row: "Longs", _value: np.float32, item: int, scratch: int) -> None:
    """Lays one tile of rows out as [depth, rows of the tile], first rounded to 8 bits or bf16 if the product is."""
    rows = num_rows(row[ROWS])
    num_tiles = _num_tiles(row, rows)
    begin, end = item * rows // num_tiles, (item + 1) * rows // num_tiles
    height, depth, width = end - begin, row[_DEPTH], row[_IN]
    is_quantized = row[_KIND] == _INT8
    packed = words_at(row[_PACKED] + 4 * begin * depth, (depth, height))
    scales = floats_at(row[_ROW_SCALES], rows)
    factors = row[_ROW_SCALES] + 4 * begin * _num_row_factors(row)
    for i in range(height):
        source = begin + i
        if row[X_ROWS]:
            source = longs_at(row[X_ROWS], end)[source]
        address = row[X] + source * row[X_STEP]
        if is_quantized:
            scales[begin + i] = quantize_row(floats_at(address, width), scratch, depth)
            address = scratch
        elif row[_KIND] == _BF16:
            round_row_to_bf16(floats_at(address, width), scratch)
            address = scratch
        elif _has_int8_by_groups(row):
            halves = row[_NUM_BITS] < 8
            pack_groups(address, width, row[_ORDER], row[_GROUP_SIZE], halves, packed, i, factors, scratch)
            continue
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
    num_blocks = -(-_num_tiles(row, rows) // _block_tiles(row))
    return num_blocks * min(int(row[SHARES]), int(-(-row[_N] // GROUP)))


@item_kernel
def linear_item(row: "Longs", _value: np.float32, item: int, scratch: int) -> None:
    """Multiplies a block of tiles with some groups of columns, columns outermost."""
    rows = num_rows(row[ROWS])
    num_tiles, num_groups = _num_tiles(row, rows), -(-row[_N] // GROUP)
    num_shares = min(row[SHARES], num_groups)
    block, share = item // num_shares, item % num_shares
    block_tiles = _block_tiles(row)
    first_tile, last_tile = block * block_tiles, min(num_tiles, (block + 1) * block_tiles)
    # then registers allow for twice the width
    can_widen = -(-rows // num_tiles) <= _max_rows(row) // 2
    if row[_FACTORS_FORM] and 2 * GROUP // LANES * (row[_IN] // row[_GROUP_SIZE]) > MAX_EXPANDED:
        can_widen = False
    group, end = share * num_groups // num_shares, (share + 1) * num_groups // num_shares
    while group < end:
        num_wide = 2 if can_widen and group + 2 <= end else 1
        if row[_FACTORS_FORM]:
            _expand_factors(row, group, num_wide, scratch + FACTORS)
        for tile in range(first_tile, last_tile):
            begin, stop = tile * rows // num_tiles, (tile + 1) * rows // num_tiles
            following = group
            if tile == last_tile - 1:  # of this item, or of the one that this thread is likely to take next
                following = min(group + num_wide, num_groups - num_wide)
            _multiply(row, rows, begin, stop, group, num_wide, following, scratch)
        group += num_wide


@inline
def _block_tiles(row: "Longs") -> int:
    """Returns the tiles of rows in an item."""
    return BLOCK_ROWS // _max_rows(row)


@kernel
def _expand_factors(row: "Longs", group: int, num_wide: int, target: int) -> None:
    """Expands the factors of one or two groups of columns."""
    num_groups, num_units, form = row[_IN] // row[_GROUP_SIZE], row[_NUM_UNITS], row[_FACTORS_FORM]
    units = row[_SCALES] + group * GROUP * num_units * UNIT_BYTES[form]
    codes = row[_CODES] + group * GROUP * num_groups * CODE_BYTES[form]
    expand_factors(form, units, codes, row[_ZERO], num_groups, num_units, num_wide * GROUP // LANES, target)


@spliced
def _multiply(
    row: "Longs", rows: int, begin: int, end: int, group: int, num_wide: int, following: int, scratch: int
) -> None:
    """Multiplies rows begin:end with one or two groups of columns; prefetches the weights of the next group."""
    kind, depth, n = row[_KIND], row[_DEPTH], row[_N]
    height, wide, column = end - begin, num_wide == 2, group * GROUP
    width = num_wide * GROUP
    a = row[X] if _is_packed(row, rows) else row[_PACKED] + 4 * begin * depth
    group_bytes = GROUP * depth * _word_bits(row) // 8
    b, ahead = row[_WEIGHT] + group * group_bytes, row[_WEIGHT] + following * group_bytes
    start, bias, scales = row[_START] + 4 * column, row[_BIAS] + 4 * column, row[_SCALES] + 4 * column
    place, step = row[_OUT] + 4 * (begin * n + column), 4 * n
    is_whole = column + width <= n
    c, c_step = (place, step) if is_whole else (scratch, 4 * width)
    if kind == _FP32:
        multiply_fp32(height, wide, a, b, depth, start, 0, c, c_step, ahead)
    elif _is_two_bytes(kind):
        multiply_two_byte_weights(kind == _BF16_WEIGHTS, height, wide, a, b, depth, start, c, c_step, ahead)
    elif kind == _BF16:
        multiply_bf16(height, wide, a, b, depth, start, c, c_step, ahead)
    elif kind in (_MICROSCALED, _NVFP4):
        size, has_e4m3 = row[_GROUP_SIZE], int(kind == _NVFP4)
        num_groups = depth // size
        factors = row[_CODES] + num_groups * column
        multiply_microscaled(has_e4m3, height, wide, a, b, size, num_groups, start, factors, scales, c, c_step, ahead)
    elif kind in (_GROUPS, _INT8_BY_GROUPS):
        size, num_bits = row[_GROUP_SIZE], row[_NUM_BITS]
        num_groups = row[_IN] // size
        factors = scratch + FACTORS if row[_FACTORS_FORM] else row[_SCALES] + 8 * num_groups * column
        if kind == _INT8_BY_GROUPS:
            row_factors = row[_ROW_SCALES] + 8 * num_groups * begin
            multiply_int8_by_groups(
                num_bits, height, wide, a, b, size, num_groups, start, factors, row_factors, c, c_step, ahead
            )
        else:
            multiply_grouped(num_bits, height, wide, a, b, size, num_groups, start, factors, c, c_step, ahead)
    elif kind == _INT8_WEIGHTS:
        multiply_int8_weights(height, wide, a, b, depth, start, scales, bias, c, c_step, ahead)
    else:
        row_scales = row[_ROW_SCALES] + 4 * begin
        multiply_int8(height, wide, a, b, depth, start, scales, row_scales, bias, c, c_step, ahead)
    if not is_whole:
        for i in range(height):
            floats_at(place + i * step, n - column)[:] = floats_at(c + i * c_step, n - column)
