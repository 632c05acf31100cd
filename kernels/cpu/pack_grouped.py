"""Lays quantised weights of checkpoints out for the kernels, with the values that they have."""

from collections.abc import Sequence

import torch

from kernels.cpu.group_factors import MAX_EXPANDED, FactorsForm, GroupFactors, compact_factors
from kernels.cpu.group_integers import pack_integers, stored_bits
from kernels.cpu.huge_pages import allocate
from kernels.cpu.packed_linear import (
    GROUP,
    Int8Packing,
    Kind,
    PackedLinear,
    pack_linear,
    padded_bias,
    padded_rows,
    write_panels,
)
from kernels.cpu.tile import LANES
from kernels.grouped_weights import GroupedWeights
from kernels.microscaled_weights import Fp4Weights, NvFp4Weights

_MAX_GROUP_SIZE = (1 << 31) // (255 * 128)
"""Sums of a group of products of bytes are int32."""


def pack_grouped(weights: GroupedWeights, bias: torch.Tensor | None, *, quantize: bool) -> PackedLinear:
    """Lays quantised weights of a checkpoint out for the kernels, with the values that they have.

    Args:
        weights: int8 with one scale per row becomes the form of `pack_linear`; all else is multiplied in groups, if
            `is_multiplied_in_groups`, or else dequantised.
        bias: [out], of any type; widened to fp32.
        quantize: whether inputs are quantised to int8 even if the checkpoint is not meant for it: those of groups with
            a scale per token and group.
    """
    num_out, num_in = weights.values.shape
    biases = padded_bias(bias, num_out)
    if weights.is_int8_per_row:
        packing = Int8Packing(num_out, num_in, biases, has_int8_inputs=quantize or weights.quantizes_inputs)
        for (begin, rows), (_, scales) in zip(
            padded_rows(weights.values, 128), padded_rows(weights.scales, num_values=num_in), strict=True
        ):
            packing.write(begin, (rows.short() - 128).to(torch.int8), scales[:, 0])
        return packing.packed()
    if not is_multiplied_in_groups(weights):
        return pack_linear(weights.dequantized(torch.float32), bias, quantize=quantize)
    num_bits = stored_bits(weights.num_bits, num_in)
    cells = allocate(len(biases) // LANES, num_in * num_bits // 32, LANES, 4, dtype=torch.uint8)
    for begin, rows in padded_rows(weights.values):
        write_panels(cells, begin, pack_integers(rows, num_bits).view(-1, LANES, cells.shape[1], 4))
    factors = compact_factors(weights)
    if GROUP // LANES * weights.scales.shape[1] > MAX_EXPANDED:
        factors = GroupFactors(FactorsForm.FP32, (weights.scales, weights.offsets))
    units, codes = (_panels_of(numbers, num_in) for numbers in (factors.units, factors.codes))
    kind = Kind.INT8_BY_GROUPS if quantize else Kind.GROUPS
    return PackedLinear(
        num_in, num_out, kind, cells, biases, biases, units, weights.group_size, weights.input_order,
        factors.form, codes, factors.zero_point, num_bits,
    )  # fmt: skip


def is_multiplied_in_groups(weights: GroupedWeights) -> bool:
    """Whether the kernels multiply such groups; others are of sizes that no tool writes."""
    return weights.group_size % 8 == 0 and weights.group_size <= _MAX_GROUP_SIZE


def _panels_of(numbers: Sequence[torch.Tensor], num_in: int) -> torch.Tensor:
    """[out, n] each -> [N / 16, n, kinds, 16]; num_in: weights of a row."""
    if not numbers:
        return torch.empty(0, dtype=torch.int8)
    num_out, size = numbers[0].shape
    panels = allocate((num_out + -num_out % GROUP) // LANES, size, len(numbers), LANES, dtype=numbers[0].dtype)
    for kind, rows_of_kind in enumerate(numbers):
        for begin, rows in padded_rows(rows_of_kind, num_values=num_in):
            write_panels(panels[:, :, kind], begin, rows.view(-1, LANES, size))
    return panels


def pack_fp4(weights: Fp4Weights, bias: torch.Tensor | None) -> PackedLinear:
    """Lays weights in 4-bit floats out for the kernels, with the values that they have.

    Args:
        weights: the matrix.
        bias: [out], of any type; widened to fp32.
    """
    num_out, num_in = weights.codes.shape[0], weights.in_features
    biases, scales = padded_bias(bias, num_out), torch.full((num_out + -num_out % GROUP,), 0.5)
    if isinstance(weights, NvFp4Weights):
        kind, group_codes = Kind.NVFP4, weights.scales.view(torch.uint8)
        scales[:num_out] *= weights.row_scales
    else:
        kind, group_codes = Kind.MICROSCALED, weights.exponents
    num_panels, num_groups = len(biases) // LANES, group_codes.shape[1]
    panels = allocate(num_panels, num_in // 2, LANES, dtype=torch.uint8)
    for begin, rows in padded_rows(weights.codes):
        write_panels(panels, begin, rows.view(-1, LANES, num_in // 2))
    codes = torch.empty(num_panels, num_groups, LANES, dtype=torch.uint8)
    for begin, rows in padded_rows(group_codes, num_values=num_in):
        write_panels(codes, begin, rows.view(-1, LANES, num_groups))
    return PackedLinear(num_in, num_out, kind, panels, biases, biases, scales, num_in // num_groups, codes=codes)
