"""Weights of linear layers, laid out for `multiply_tile`: fp32, bf16, fp16, int8 with one scale per output channel,
integers of 4 to 8 bits with a scale and an offset per group of inputs, MXFP4 or NVFP4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch

from kernels.cpu.arrays import check_stored
from kernels.cpu.group_factors import FactorsForm
from kernels.cpu.huge_pages import allocate
from kernels.cpu.tile import LANES

GROUP = 2 * LANES
"""Columns multiplied together; weights are padded to a multiple of it."""
_PACK_VALUES = 1 << 18
"""Weights packed at a time, so that packing needs little memory besides its result."""
_ZERO_POINT = 128  # activations are unsigned bytes


class Kind(IntEnum):
    """Type of product: fp32 activations by weights of a type, or both of 8 bits or of bf16."""

    FP32 = 0
    BF16_WEIGHTS = 1
    FP16_WEIGHTS = 2
    INT8_WEIGHTS = 3
    INT8 = 4
    GROUPS = 5
    MICROSCALED = 6
    BF16 = 7
    INT8_BY_GROUPS = 8
    NVFP4 = 9

    @property
    def has_int8_inputs(self) -> bool:
        """Whether four inputs in int8 form a word."""
        return self in (Kind.INT8, Kind.INT8_BY_GROUPS)


FLOAT_KINDS = {
    torch.float32: Kind.FP32,
    torch.bfloat16: Kind.BF16_WEIGHTS,
    torch.float16: Kind.FP16_WEIGHTS,
}
"""Kinds of the dtypes in which weights may be stored."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights of one layer, as the kernels read them. N is out_features, padded to a multiple of GROUP.

    Attributes:
        weight: floats or int8 [N / 16, in, 16]; int8 that inputs in int8 multiply [N / 16, in / 4, 16, 4]; bytes of
            integers in groups, [N / 16, in * num_bits / 32, 16, 4] (`group_integers`); of 4-bit floats, two inputs in
            each, the even one in the low half, [N / 16, in / 2, 16]; bf16 of products in bf16
            [N / 16, in / 2, 16, 2].
        start: [N], start of each sum: the bias in fp32, or an int32 that subtracts the zero point.
        bias: [N] fp32, zeros if there is none.
        scales: [N] fp32 of int8 weights, and of 4-bit floats, by whose doubled values they are halved; units of
            groups, [N / 16, units, kinds, 16].
        group_size, num_bits: inputs of a group, and bits of its integers.
        input_order: [in] int64, the input that each row of B multiplies; None: their order.
        factors_form: how scales and offsets of groups are stored.
        codes: int8 [N / 16, groups, kinds, 16] of groups; of 4-bit floats uint8 [N / 16, groups, 16], exponents of
            MXFP4 and E4M3 of NVFP4.
        zero_point: of all groups.
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
    factors_form: FactorsForm = FactorsForm.FP32
    codes: torch.Tensor | None = None
    zero_point: int = 0
    num_bits: int = 0

    @property
    def num_row_factors(self) -> int:
        """Numbers in fp32 of a packed row of inputs: its scale, or a scale and a sum of each group."""
        return 2 * self.in_features // self.group_size if self.kind is Kind.INT8_BY_GROUPS else 1

    @property
    def depth(self) -> int:
        """Words of a packed row of inputs: fp32, two bf16, or four int8."""
        num_in_word = 4 if self.kind.has_int8_inputs else 2 if self.kind is Kind.BF16 else 1
        return -(-self.in_features // num_in_word)


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, *, quantize: bool, multiplies_in_bf16: bool = False
) -> PackedLinear:
    """Lays weights out for the kernels.

    Args:
        weight: [out, in] fp32, bf16 or fp16; stays in this type unless it is quantised.
        bias: [out], of the same types; widened to fp32.
        quantize: to int8, symmetric, one scale per output channel; activations are rounded to int8 too.
        multiplies_in_bf16: whether inputs are rounded to bf16 if the weights are; needs `CpuFeatures.bf16`.
    Raises: ValueError: weight is of another type.
    """
    check_stored(weight=weight)
    num_out, num_in = weight.shape
    biases = padded_bias(bias, num_out)
    if not quantize and multiplies_in_bf16 and weight.dtype is torch.bfloat16:
        panels = allocate(len(biases) // LANES, -(-num_in // 2), LANES, 2, dtype=torch.bfloat16)
        for begin, rows in padded_rows(weight):
            pairs = torch.nn.functional.pad(rows, (0, num_in % 2)).view(-1, LANES, panels.shape[1], 2)
            write_panels(panels, begin, pairs)
        return PackedLinear(num_in, num_out, Kind.BF16, panels, biases, biases, torch.ones(len(biases)))
    if not quantize:
        panels = allocate(len(biases) // LANES, num_in, LANES, dtype=weight.dtype)
        write_float_panels(panels, weight)
        return PackedLinear(num_in, num_out, FLOAT_KINDS[weight.dtype], panels, biases, biases, torch.ones(len(biases)))
    packing = Int8Packing(num_out, num_in, biases, has_int8_inputs=True)
    memory = torch.empty(0)  # of all pieces
    for begin, rows in padded_rows(weight):
        if memory.numel() == 0:
            memory = torch.empty(rows.shape)
        exact = memory[: len(rows)].copy_(rows)
        largest = torch.maximum(exact.amax(dim=1), -exact.amin(dim=1))
        scales = torch.where(largest == 0, 1.0, largest / 127)  # NaN stays NaN, and is reported
        packing.write(begin, exact.div_(scales[:, None]).round_(), scales)
    return packing.packed()


def padded_bias(bias: torch.Tensor | None, num_out: int) -> torch.Tensor:
    """Returns the bias [num_out] in fp32, or zeros, padded to whole groups of columns."""
    biases = torch.zeros(num_out + -num_out % GROUP)
    if bias is not None:
        biases[:num_out] = bias
    return biases


def padded_rows(
    matrix: torch.Tensor, padding: int = 0, *, num_values: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the first row and rows of a matrix, as many at a time as have _PACK_VALUES weights; all but the last are
    whole groups, which is padded to one.

    num_values: weights of a row, if the matrix holds something else for each row.
    """
    num_rows = max(GROUP, _PACK_VALUES // (num_values or matrix.shape[1]) // GROUP * GROUP)
    for begin in range(0, len(matrix), num_rows):
        rows = matrix[begin : begin + num_rows]
        missing = -len(rows) % GROUP
        yield begin, torch.nn.functional.pad(rows, (0, 0, 0, missing), value=padding) if missing else rows


def write_float_panels(panels: torch.Tensor, weight: torch.Tensor) -> None:
    """Lays out weight [out, in] in panels [N / 16, in, 16] of the same type, N: out padded to a multiple of GROUP."""
    for begin, rows in padded_rows(weight):
        write_panels(panels, begin, rows.view(-1, LANES, weight.shape[1]))


def write_panels(panels: torch.Tensor, begin: int, rows: torch.Tensor) -> None:
    """Writes rows [panels, LANES, cells] behind those before `begin`."""
    panels[begin // LANES : begin // LANES + len(rows)] = rows.transpose(1, 2)


class Int8Packing:
    """Lays out int8 weights with one scale per row, some rows at a time."""

    def __init__(self, num_out: int, num_in: int, biases: torch.Tensor, *, has_int8_inputs: bool) -> None:
        self._num_out, self._num_in, self._biases = num_out, num_in, biases
        self._kind = Kind.INT8 if has_int8_inputs else Kind.INT8_WEIGHTS
        shape = (-(-num_in // 4), LANES, 4) if has_int8_inputs else (num_in, LANES)
        self._panels = allocate(len(biases) // LANES, *shape, dtype=torch.int8)
        self._start = torch.zeros(len(biases), dtype=torch.int32)
        self._scales = torch.ones(len(biases))

    def write(self, begin: int, rows: torch.Tensor, scales: torch.Tensor) -> None:
        """Writes rows [n, in], int8 or integers in fp32, and their scales [n]."""
        end = begin + len(rows)
        self._scales[begin:end] = scales
        if self._kind is Kind.INT8:
            # without a copy in int32; fp32 is exact for sums up to 2^24
            is_exact = rows.dtype is torch.float32 and self._num_in * 127 < 1 << 24
            self._start[begin:end] = rows.sum(dim=1, dtype=None if is_exact else torch.int32) * -_ZERO_POINT
            if missing := -self._num_in % 4:
                rows = torch.nn.functional.pad(rows, (0, missing))
            rows = rows.view(-1, LANES, self._panels.shape[1], 4)
        else:
            rows = rows.view(-1, LANES, self._num_in)
        write_panels(self._panels, begin, rows)

    def packed(self) -> PackedLinear:
        """Returns the layer."""
        return PackedLinear(
            self._num_in, self._num_out, self._kind, self._panels, self._start, self._biases, self._scales
        )
