"""Linear layers on weights packed for `multiply_tile`: fp32, bf16, fp16, or int8 with one scale per output channel.

A layer takes two instructions: PACK_ROWS lays the input out in tiles and quantises it if the weights are; LINEAR
multiplies. An item of LINEAR is some columns and up to BLOCK_TILES tiles of rows, which share one read of each panel of
weights.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from kernels.cpu.arrays import check_fp32, check_stored
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.instruction import FIRST_OPERAND, ROWS, SHARES, SHARES_PER_THREAD, Opcode, num_rows
from kernels.cpu.intrinsics import floats_at, words_at
from kernels.cpu.jit import inline, kernel
from kernels.cpu.multiply_tile import (
    LANES,
    MAX_ROWS,
    multiply_fp32,
    multiply_int8_weights,
    multiply_two_byte_weights,
    multiply_vnni,
)
from kernels.cpu.quantize import quantize_row
from kernels.cpu.recording import Recording

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
_X, _X_STEP, _IN, _DEPTH, _KIND, _PACKED, _ROW_SCALES = range(FIRST_OPERAND, FIRST_OPERAND + 7)
_WEIGHT, _OUT, _N, _START, _BIAS, _SCALES = range(FIRST_OPERAND + 7, FIRST_OPERAND + 13)


class Kind(IntEnum):
    """Type of product: fp32 activations by weights of a type, or both of 8 bits."""

    FP32 = 0
    BF16_WEIGHTS = 1
    FP16_WEIGHTS = 2
    INT8_WEIGHTS = 3
    INT8 = 4


FLOAT_KINDS = {
    torch.float32: Kind.FP32,
    torch.bfloat16: Kind.BF16_WEIGHTS,
    torch.float16: Kind.FP16_WEIGHTS,
}
"""Kinds of the dtypes in which weights may be stored."""

_FP32, _BF16_WEIGHTS, _FP16_WEIGHTS = int(Kind.FP32), int(Kind.BF16_WEIGHTS), int(Kind.FP16_WEIGHTS)
_INT8_WEIGHTS, _INT8 = int(Kind.INT8_WEIGHTS), int(Kind.INT8)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights of one layer, as the kernels read them. N is out_features, padded to a multiple of GROUP.

    Attributes:
        weight: floats or int8 [N / 16, in, 16]; int8 may be, four inputs side by side, [N / 16, in / 4, 16, 4].
        start: [N], start of each sum: the bias in fp32, or an int32 that subtracts the zero point.
        bias: [N] fp32, zeros if there is none.
        scales: [N] fp32 of int8 weights.
    """

    in_features: int
    out_features: int
    kind: Kind
    weight: torch.Tensor
    start: torch.Tensor
    bias: torch.Tensor
    scales: torch.Tensor


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
    padded_out = num_out + -num_out % GROUP
    biases = torch.zeros(padded_out)
    if bias is not None:
        biases[:num_out] = bias
    kind = FLOAT_KINDS[weight.dtype]
    if quantize:
        kind = Kind.INT8 if cpu_features().vnni else Kind.INT8_WEIGHTS
    num_fours = -(-num_in // 4)
    start = torch.zeros(padded_out, dtype=torch.int32) if quantize else biases
    scales = torch.ones(padded_out)
    panels = torch.empty(
        (padded_out // LANES, num_fours, LANES, 4) if kind is Kind.INT8 else (padded_out // LANES, num_in, LANES),
        dtype=torch.int8 if quantize else weight.dtype,
    )
    num_rows = max(GROUP, _PACK_VALUES // num_in // GROUP * GROUP)
    for begin in range(0, padded_out, num_rows):
        end = min(padded_out, begin + num_rows)
        rows = weight[begin:end]
        if len(rows) < end - begin:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, end - begin - len(rows)))
        if quantize:
            rows = rows.float()
            largest = rows.abs().amax(dim=1)
            scales[begin:end] = torch.where(largest > 0, largest / 127, 1.0)
            rows = (rows / scales[begin:end, None]).round().to(torch.int8)
        if kind is Kind.INT8:
            start[begin:end] = rows.sum(dim=1, dtype=torch.int32) * -_ZERO_POINT
            rows = torch.nn.functional.pad(rows, (0, -num_in % 4)).view(-1, LANES, num_fours, 4)
        else:
            rows = rows.view(-1, LANES, num_in)
        panels[begin // LANES : end // LANES] = rows.transpose(1, 2)
    return PackedLinear(num_in, num_out, kind, panels, start, biases, scales)


def emit_linear(recording: Recording, x: torch.Tensor, weights: PackedLinear) -> torch.Tensor:
    """Emits the two instructions of x [T, in] -> [T, out].

    Raises: ValueError: x is not fp32, or of another width.
    """
    check_fp32(x=x)
    if x.ndim != 2 or x.shape[1] != weights.in_features or x.stride(1) != 1:
        raise ValueError(f"x has shape {list(x.shape)}, strides {x.stride()}; the layer takes {weights.in_features}")
    depth = -(-weights.in_features // 4) if weights.kind is Kind.INT8 else weights.in_features
    packed, row_scales = recording.empty(x, depth), recording.empty(x)
    out = recording.empty(x, weights.out_features)
    shared = (
        x.data_ptr(), x.stride(0) * 4, weights.in_features, depth, int(weights.kind),
        packed.data_ptr(), row_scales.data_ptr(),
    )  # fmt: skip
    recording.emit(Opcode.PACK_ROWS, x, *shared)
    recording.emit(
        Opcode.LINEAR,
        x,
        *shared,
        weights.weight.data_ptr(),
        out.data_ptr(),
        weights.out_features,
        weights.start.data_ptr(),
        weights.bias.data_ptr(),
        weights.scales.data_ptr(),
    )
    recording.keep(weights)
    return out


@inline
def _is_two_bytes(kind: int) -> bool:
    return _BF16_WEIGHTS <= kind <= _FP16_WEIGHTS


@kernel
def _num_tiles(rows: int) -> int:
    return -(-rows // MAX_ROWS)


@kernel
def _is_packed(row: "Longs", rows: int) -> bool:
    """Tells whether the rows need no packing: a single fp32 row is already packed."""
    return rows == 1 and row[_KIND] != _INT8


@kernel
def num_pack_items(row: "Longs") -> int:
    """Returns the items of PACK_ROWS: one per tile, none if there is nothing to pack."""
    rows = num_rows(row[ROWS])
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
        address = row[_X] + (begin + i) * row[_X_STEP]
        if is_quantized:
            scales[begin + i] = quantize_row(floats_at(address, width), scratch, depth)
            address = scratch
        words = words_at(address, depth)
        for k in range(depth):
            packed[k, i] = words[k]


@kernel
def num_linear_items(row: "Longs") -> int:
    """Returns the items of LINEAR: blocks of tiles times shares of the columns."""
    rows = num_rows(row[ROWS])
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
    a = row[_X] if _is_packed(row, rows) else row[_PACKED] + 4 * begin * depth
    group_bytes = GROUP * depth * (1 if kind == _INT8_WEIGHTS else 2 if _is_two_bytes(kind) else 4)
    b, ahead = row[_WEIGHT] + group * group_bytes, row[_WEIGHT] + following * group_bytes
    start, bias, scales = row[_START] + 4 * column, row[_BIAS] + 4 * column, row[_SCALES] + 4 * column
    place, step = row[_OUT] + 4 * (begin * n + column), 4 * n
    is_whole = column + width <= n
    c, c_step = (place, step) if is_whole else (scratch, 4 * width)
    if kind == _FP32:
        multiply_fp32(height, wide, a, b, depth, start, c, c_step, ahead)
    elif _is_two_bytes(kind):
        multiply_two_byte_weights(kind == _BF16_WEIGHTS, height, wide, a, b, depth, start, c, c_step, ahead)
    elif kind == _INT8_WEIGHTS:
        multiply_int8_weights(height, wide, a, b, depth, start, scales, bias, c, c_step, ahead)
    else:
        row_scales = row[_ROW_SCALES] + 4 * begin
        multiply_vnni(height, wide, a, b, depth, start, scales, row_scales, bias, c, c_step, ahead)
    if not is_whole:
        for i in range(height):
            floats_at(place + i * step, n - column)[:] = floats_at(c + i * c_step, n - column)
