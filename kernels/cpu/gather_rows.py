"""Rows of a table: of a plain one, or of weights that are packed for `kernels.cpu.linear`."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.cpu.arrays import check_integers, check_stored
from kernels.cpu.group_factors import CODE_BYTES, UNIT_BYTES, FactorsForm, expand_factors
from kernels.cpu.group_integers import integer_at
from kernels.cpu.instruction import FIRST_OPERAND, Opcode, first_row, item_kernel
from kernels.cpu.intrinsics import bytes_at, floats_at, longs_at, shorts_at
from kernels.cpu.jit import inline
from kernels.cpu.packed_linear import FLOAT_KINDS, Kind, PackedLinear
from kernels.cpu.recording import Recording
from kernels.cpu.tile import LANES
from kernels.cpu.two_bytes import bf16_to_fp32, fp16_to_fp32

if TYPE_CHECKING:
    from kernels.cpu.arrays import Floats, Longs

_X, _OUT, _N, _INDICES, _KIND, _STEP = range(FIRST_OPERAND, FIRST_OPERAND + 6)
_UNITS, _CODES, _FORM, _ZERO_POINT, _NUM_UNITS, _GROUP_SIZE, _NUM_BITS = range(FIRST_OPERAND + 6, FIRST_OPERAND + 13)

_FP32, _BF16_WEIGHTS, _FP16_WEIGHTS = int(Kind.FP32), int(Kind.BF16_WEIGHTS), int(Kind.FP16_WEIGHTS)
_BF16 = int(Kind.BF16)
_FACTORS_IN_FP32 = int(FactorsForm.FP32)
_IN_GROUPS = (Kind.GROUPS, Kind.INT8_BY_GROUPS)


def can_gather(weights: PackedLinear) -> bool:
    """Tells whether the rows of a linear layer can be gathered: not those of int8 with one scale per row."""
    return weights.kind in (*FLOAT_KINDS.values(), Kind.BF16, *_IN_GROUPS) and weights.input_order is None


def emit_gather_rows(recording: Recording, table: torch.Tensor | PackedLinear, indices: torch.Tensor) -> torch.Tensor:
    """Gathers the rows with indices [T] int64: -> [T, n] fp32.

    Args:
        table: [N, n] fp32, bf16 or fp16, or a linear layer that `can_gather` accepts.

    Raises: ValueError: of another type, or not contiguous.
    """
    check_integers(torch.int64, indices=indices)
    if isinstance(table, PackedLinear):
        if not can_gather(table):
            raise ValueError(f"rows of weights of kind {table.kind.name} cannot be gathered")
        values, kind, n, step = table.weight, table.kind, table.in_features, LANES
    else:
        check_stored(table=table)
        if not table.is_contiguous():
            raise ValueError(f"table of shape {list(table.shape)} is not contiguous")
        values, kind, n, step = table, FLOAT_KINDS[table.dtype], table.shape[1], 1
    out = recording.empty(indices, n)
    operands: tuple[int, ...] = values.data_ptr(), out.data_ptr(), n, indices.data_ptr(), int(kind), step
    if isinstance(table, PackedLinear) and kind in _IN_GROUPS:
        codes = table.codes
        operands += (
            table.scales.data_ptr(), 0 if codes is None else codes.data_ptr(), int(table.factors_form),
            table.zero_point, table.scales.shape[1], table.group_size, table.num_bits,
        )  # fmt: skip
    recording.emit(Opcode.GATHER_ROWS, indices, *operands)
    recording.keep(table)
    return out


@item_kernel
def gather_rows_item(row: "Longs", _value: np.float32, item: int, scratch: int) -> None:
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
        elif kind == _BF16:
            num_pairs = (n + 1) // 2
            pairs = shorts_at(row[_X] + 4 * (indices[i] // step * num_pairs * step + lane), 2 * num_pairs * step)
            for j in range(n):
                target[j] = bf16_to_fp32(pairs[j // 2 * 2 * step + j % 2])
        else:
            _gather_groups(row, indices[i] // step, lane, scratch, target)


@inline
def _gather_groups(row: "Longs", panel: int, lane: int, scratch: int, target: "Floats") -> None:
    """Computes values * scale + offset of a lane of a panel; see `PackedLinear`."""
    n, size, form = len(target), row[_GROUP_SIZE], row[_FORM]
    num_groups, num_units = n // size, row[_NUM_UNITS]
    units = row[_UNITS] + panel * num_units * UNIT_BYTES[form] * LANES
    if form == _FACTORS_IN_FP32:
        factors = floats_at(units, 2 * num_groups * LANES)
    else:
        codes = row[_CODES] + panel * num_groups * CODE_BYTES[form] * LANES
        expand_factors(form, units, codes, row[_ZERO_POINT], num_groups, num_units, 1, scratch)
        factors = floats_at(scratch, 2 * num_groups * LANES)
    num_bits = row[_NUM_BITS]
    num_bytes = n * num_bits // 8
    cells = bytes_at(row[_X] + panel * num_bytes * LANES, num_bytes * LANES)
    for j in range(n):
        value = integer_at(cells, num_bits, n, lane, j)
        place = 2 * (j // size) * LANES + lane
        # In fp64, as `GroupedWeights.dequantized` does.
        target[j] = np.float32(value * np.float64(factors[place]) + np.float64(factors[place + LANES]))
