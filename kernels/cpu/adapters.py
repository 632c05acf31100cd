"""Adapters of linear layers (LoRA, arXiv:2106.09685): y += B (A x), with the A and B that the adapter of a row has.

A layer takes two instructions ADAPT: h = A x, and y += B h. An item is some columns of the result for up to MAX_ROWS of
the step's adapted tokens, which are sorted by adapter, so that those of one adapter share each read of its weights.
Sums are those of `multiply_tile`: the bits of a row depend on its adapter, not on the other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.cpu.arrays import check_fp32
from kernels.cpu.instruction import FIRST_OPERAND, ROWS, SCRATCH_BYTES, SHARES_PER_THREAD, Opcode, item_kernel, num_rows
from kernels.cpu.intrinsics import floats_at, longs_at, words_at
from kernels.cpu.jit import kernel
from kernels.cpu.multiply_tile import multiply_fp32
from kernels.cpu.packed_linear import GROUP, write_float_panels
from kernels.cpu.recording import Recording
from kernels.cpu.tile import LANES, MAX_ROWS
from kernels.interface import LowRank
from kernels.metadata import AdaptedTokens

if TYPE_CHECKING:
    from kernels.cpu.arrays import Longs

_X, _X_STEP, _OUT, _OUT_STEP, _INDICES, _ADAPTERS, _TABLE, _PARTS, _SHARES, _MOST_ROWS, _IS_ADDED = range(
    FIRST_OPERAND, FIRST_OPERAND + 11
)

# A table holds for each adapter its parts, each a matrix: address, terms of a sum, groups of columns, first input,
# first column of the result, columns. What is zero does nothing.
_WEIGHT, _DEPTH, _GROUPS, _FIRST_IN, _FIRST_OUT, _COLUMNS, _ENTRY = range(7)
_TILE_BYTES = 4 * MAX_ROWS * 2 * GROUP


@dataclass(frozen=True, slots=True)
class PackedAdapters:
    """What the adapters change of one layer. Tables are read when a step runs, so that adapters may be replaced.

    Attributes:
        in_features: columns of the layer.
        out_features: past the last row that an adapter may change.
        max_rank: most terms of one change.
        width: of h: most ranks of all changes of an adapter, padded to a multiple of GROUP.
        down: [adapters, 1, 6] int64, table of A, those of all changes side by side.
        up: [adapters, parts, 6] int64, table of B, one part for each change.
        matrices: their memory, one tensor for each adapter.
        rows: first and last of the rows that may be changed together, exclusive.
    """

    in_features: int
    out_features: int
    max_rank: int
    width: int
    down: torch.Tensor
    up: torch.Tensor
    matrices: tuple[torch.Tensor, ...]
    rows: tuple[tuple[int, int], ...]


def reserve_adapters(
    num_adapters: int, max_rank: int, in_features: int, rows: Sequence[tuple[int, int]]
) -> PackedAdapters:
    """Allocates the memory of adapters that `set_adapter` writes later; until then they change nothing."""
    width = _padded(max_rank * len(rows))
    num_floats = width * in_features + sum(_padded(last - first) * max_rank for first, last in rows)
    return PackedAdapters(
        in_features,
        max(last for _, last in rows),
        max_rank,
        width,
        torch.zeros(num_adapters, 1, _ENTRY, dtype=torch.int64),
        torch.zeros(num_adapters, len(rows), _ENTRY, dtype=torch.int64),
        # Written, or the machine would give the pages when an adapter is loaded, which may then fail.
        tuple(torch.empty(num_floats).zero_() for _ in range(num_adapters)),
        tuple(rows),
    )


def set_adapter(adapters: PackedAdapters, index: int, changes: Sequence[LowRank]) -> None:
    """Writes one adapter of `reserve_adapters`, which no step that runs may use.

    Raises: ValueError: shapes, ranks or types are not those that were reserved; the adapter then changes nothing.
    """
    down, up = adapters.down[index, 0], adapters.up[index]
    down.zero_()
    up.zero_()
    for a, b, first_row in changes:
        span = (first_row, first_row + len(b))
        if len(a) > adapters.max_rank or a.shape[1] != adapters.in_features or span not in adapters.rows:
            raise ValueError(
                f"A has shape {list(a.shape)}, B {list(b.shape)} from row {first_row}; reserved are ranks up to "
                f"{adapters.max_rank}, {adapters.in_features} columns, and rows {adapters.rows}"
            )
    _write(down, up, adapters.matrices[index], changes)


def _write(down: torch.Tensor, up: torch.Tensor, memory: torch.Tensor, changes: Sequence[LowRank]) -> None:
    """Writes the matrices of an adapter to its memory, then its tables: down [6], up [parts, 6]."""
    rank = used = 0

    def entry(weight: torch.Tensor, first_in: int, first_out: int) -> torch.Tensor:
        nonlocal used
        num_out, depth = weight.shape
        panels = memory[used : used + _padded(num_out) * depth].view(-1, depth, LANES)
        used += panels.numel()
        write_float_panels(panels, weight)
        return torch.tensor([panels.data_ptr(), depth, _padded(num_out) // GROUP, first_in, first_out, num_out])

    for a, b, _ in changes:
        check_fp32(a=a, b=b)
        if a.shape[0] != b.shape[1]:
            raise ValueError(f"A has shape {list(a.shape)}, B {list(b.shape)}: their ranks differ")
    for part, (a, b, first_row) in enumerate(changes):
        up[part] = entry(b, rank, first_row)
        rank += len(a)
    if changes:
        down.copy_(entry(torch.cat([change.a for change in changes]), 0, 0))


def _padded(num_columns: int) -> int:
    return num_columns + -num_columns % GROUP


def emit_add_adapters(
    recording: Recording, y: torch.Tensor, x: torch.Tensor, adapters: PackedAdapters, tokens: AdaptedTokens
) -> None:
    """Emits the two instructions of y [T, out] += B (A x [T, in]).

    Raises: ValueError: x or y is not fp32, or of another width.
    """
    check_fp32(x=x, y=y)
    num_out = adapters.out_features
    if x.shape[1:] != (adapters.in_features,) or x.stride(1) != 1 or y.shape[1] < num_out or y.stride(1) != 1:
        raise ValueError(
            f"x has shape {list(x.shape)}, strides {x.stride()}, y {list(y.shape)}, {y.stride()}; the adapters take "
            f"{adapters.in_features} and change {num_out}"
        )
    h = recording.empty(x, adapters.width)
    where = tokens.indices.data_ptr(), tokens.adapters.data_ptr()
    num_shares = min(SHARES_PER_THREAD * recording.num_threads, -(-num_out // GROUP))
    for source, table, depth, out, shares in (
        (x, adapters.down, adapters.in_features, h, 1),
        (h, adapters.up, adapters.max_rank, y, num_shares),
    ):
        room = (SCRATCH_BYTES - _TILE_BYTES) // (4 * depth)
        recording.emit(
            Opcode.ADAPT,
            tokens.indices,
            source.data_ptr(),
            source.stride(0) * 4,
            out.data_ptr(),
            out.stride(0) * 4,
            *where,
            table.data_ptr(),
            table.shape[1],
            shares,
            max(1, min(MAX_ROWS, room)),
            int(out is y),
        )
    recording.keep((adapters, tokens))


@kernel
def num_adapt_items(row: "Longs") -> int:
    """Returns the items: tiles of tokens times shares of the columns."""
    return int(-(-num_rows(row[ROWS]) // MAX_ROWS) * row[_SHARES])


@item_kernel
def adapt_item(row: "Longs", _value: np.float32, item: int, scratch: int) -> None:
    """Multiplies the tokens of a tile, those of one adapter at a time, with a share of the columns."""
    num_tokens = num_rows(row[ROWS])
    num_tiles = -(-num_tokens // MAX_ROWS)
    tile, share = item // row[_SHARES], item % row[_SHARES]
    begin, end = tile * num_tokens // num_tiles, (tile + 1) * num_tokens // num_tiles
    adapters = longs_at(row[_ADAPTERS], num_tokens)
    while begin < end:
        stop = begin + 1
        while stop < end and stop - begin < row[_MOST_ROWS] and adapters[stop] == adapters[begin]:
            stop += 1
        parts = longs_at(row[_TABLE] + 8 * _ENTRY * row[_PARTS] * adapters[begin], (row[_PARTS], _ENTRY))
        num_groups = 0
        for part in range(row[_PARTS]):
            num_groups += parts[part, _GROUPS]
        first, last = share * num_groups // row[_SHARES], (share + 1) * num_groups // row[_SHARES]
        for part in range(row[_PARTS]):
            num_here = parts[part, _GROUPS]
            if first < num_here and last > 0:
                _multiply(row, parts[part], begin, stop, max(first, 0), min(last, num_here), scratch)
            first, last = first - num_here, last - num_here
        begin = stop


@kernel
def _multiply(row: "Longs", part: "Longs", begin: int, end: int, group: int, last: int, scratch: int) -> None:
    """Multiplies tokens begin:end, which have the same adapter, with some groups of columns of a matrix."""
    height, depth = end - begin, part[_DEPTH]
    indices = longs_at(row[_INDICES] + 8 * begin, height)
    x = row[_X] + 4 * part[_FIRST_IN]
    a, c = x + indices[0] * row[_X_STEP], scratch
    if height > 1:
        a = scratch + _TILE_BYTES
        packed = words_at(a, (depth, height))
        for i in range(height):
            words = words_at(x + indices[i] * row[_X_STEP], depth)
            for k in range(depth):
                packed[k, i] = words[k]
    is_low = height <= MAX_ROWS // 2
    while group < last:
        wide = is_low and group + 2 <= last
        width = 2 * GROUP if wide else GROUP
        column = group * GROUP
        num_columns = min(width, part[_COLUMNS] - column)
        out = row[_OUT] + 4 * (part[_FIRST_OUT] + column)
        sums = floats_at(c, (height, width))
        for i in range(height):
            sums[i] = 0
            if row[_IS_ADDED]:
                sums[i, :num_columns] = floats_at(out + indices[i] * row[_OUT_STEP], num_columns)
        b = part[_WEIGHT] + 4 * column * depth
        multiply_fp32(height, wide, a, b, depth, c, 4 * width, c, 4 * width, b)
        for i in range(height):
            floats_at(out + indices[i] * row[_OUT_STEP], num_columns)[:] = sums[i, :num_columns]
        group += width // GROUP
