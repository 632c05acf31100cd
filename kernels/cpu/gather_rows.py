"""Rows of a table: of a plain one, or of weights that are packed for `kernels.cpu.linear`."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.cpu.arrays import check_stored
from kernels.cpu.instruction import FIRST_OPERAND, Opcode, first_row
from kernels.cpu.intrinsics import bytes_at, floats_at, longs_at, shorts_at
from kernels.cpu.jit import inline, kernel
from kernels.cpu.linear import FLOAT_KINDS, Kind, PackedLinear
from kernels.cpu.recording import Recording
from kernels.cpu.tile import LANES
from kernels.cpu.two_bytes import bf16_to_fp32, fp16_to_fp32

if TYPE_CHECKING:
    from kernels.cpu.arrays import Floats, Longs

_X, _OUT, _N, _INDICES, _KIND, _STEP, _FACTORS, _GROUP_SIZE = range(FIRST_OPERAND, FIRST_OPERAND + 8)

_FP32, _BF16_WEIGHTS, _FP16_WEIGHTS = int(Kind.FP32), int(Kind.BF16_WEIGHTS), int(Kind.FP16_WEIGHTS)
_GROUPS_OF_4_BITS = int(Kind.GROUPS_OF_4_BITS)
_KINDS = (*FLOAT_KINDS.values(), Kind.GROUPS_OF_4_BITS, Kind.GROUPS_OF_8_BITS)


def can_gather(weights: PackedLinear) -> bool:
    """Tells whether the rows of a linear layer can be gathered: not those of int8 with one scale per row."""
    return weights.kind in _KINDS and weights.input_order is None


def emit_gather_rows(recording: Recording, table: torch.Tensor | PackedLinear, indices: torch.Tensor) -> torch.Tensor:
    """Gathers the rows with indices [T] int64: -> [T, n] fp32.

    Args:
        table: [N, n] fp32, bf16 or fp16, or a linear layer that `can_gather` accepts.

    Raises: ValueError: of another type, or not contiguous.
    """
    if isinstance(table, PackedLinear):
        if not can_gather(table):
            raise ValueError(f"rows of weights of kind {table.kind.name} cannot be gathered")
        values, factors, kind, n, step = table.weight, table.scales, table.kind, table.in_features, LANES
        group_size = table.group_size
    else:
        check_stored(table=table)
        if not table.is_contiguous():
            raise ValueError(f"table of shape {list(table.shape)} is not contiguous")
        values, factors, kind, n, step, group_size = table, table, FLOAT_KINDS[table.dtype], table.shape[1], 1, 0
    out = recording.empty(indices, n)
    operands = out.data_ptr(), n, indices.data_ptr(), int(kind), step, factors.data_ptr(), group_size
    recording.emit(Opcode.GATHER_ROWS, indices, values.data_ptr(), *operands)
    recording.keep((values, factors))
    return out


@kernel
def gather_rows_item(row: "Longs", item: int) -> None:
    """Copies some rows, widened to fp32."""
    begin, end, n, kind, step = first_row(item, row), first_row(item + 1, row), row[_N], row[_KIND], row[_STEP]
    indices = longs_at(row[_INDICES], end)
    for i in range(begin, end):
        target, lane = floats_at(row[_OUT] + 4 * n * i, n), indices[i] % step
        first = (indices[i] - lane) * n  # of the panel, or of the row
        if kind == _FP32:
            values = floats_at(row[_X] + 4 * (first + lane), n * step)
            for j in range(n):
                target[j] = values[j * step]
        elif kind <= _FP16_WEIGHTS:
            halves = shorts_at(row[_X] + 2 * (first + lane), n * step)
            for j in range(n):
                half = halves[j * step]
                target[j] = bf16_to_fp32(half) if kind == _BF16_WEIGHTS else fp16_to_fp32(half)
        else:
            size = row[_GROUP_SIZE]
            factors = floats_at(row[_FACTORS] + 8 * first // size, 2 * n // size * step)
            if kind == _GROUPS_OF_4_BITS:
                first //= 2
            _gather_groups(kind == _GROUPS_OF_4_BITS, row[_X] + first, factors, size, lane, step, target)


@inline
def _gather_groups(
    is_4_bits: bool, panel: int, factors: "Floats", group_size: int, lane: int, step: int, target: "Floats"
) -> None:
    """Computes values * scale + offset of a lane of a panel; see `PackedLinear`."""
    n = len(target)
    cells = bytes_at(panel, n * step)
    for j in range(n):
        if is_4_bits:
            value = cells[j // 2 * step + lane] >> (4 * (j % 2)) & 15
        else:
            value = cells[j * step + lane] & 255
        place = 2 * (j // group_size) * step + lane
        # In fp64, as `GroupedWeights.dequantized` does.
        target[j] = np.float32(value * np.float64(factors[place]) + np.float64(factors[place + step]))
