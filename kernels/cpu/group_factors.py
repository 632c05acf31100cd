"""Scales and offsets of groups of weights: kept in few bytes, and expanded to fp32 for the columns that are multiplied.

Nothing is rounded by that: products of two numbers of at most 11 and 8 bits are exact in fp32.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.instruction import SCRATCH_BYTES
from kernels.cpu.jit import kernel
from kernels.cpu.tile import BYTES, FLOATS, INTS, LANES, MAX_ROWS, broadcast, load
from kernels.cpu.two_bytes import emit_fp16_to_fp32
from kernels.grouped_weights import GroupedWeights, Superblocks

_I64 = ir.IntType(64)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


class FactorsForm(IntEnum):
    """What is kept of scales and offsets: units, which are numbers, and codes, which are int8.

    The units of superblocks are those of several groups.
    """

    FP32 = 0
    """Units are scales and offsets in fp32."""
    SCALES = 1
    """Units are scales in fp16; an offset is minus one zero point times the scale."""
    ZERO_POINTS = 2
    """Units are scales in fp16, codes are zero points."""
    SCALES_AND_OFFSETS = 3
    """Units are scales and offsets in fp16."""
    SUPERBLOCKS_OF_SCALES = 4
    """A scale is a unit in fp16 times a code; an offset is minus one zero point times the scale."""
    SUPERBLOCKS = 5
    """A scale is a unit in fp16 times a code, and an offset another unit times another code."""


FACTORS = 4 * 2 * LANES * MAX_ROWS
"""Where the scratch memory of a thread holds expanded factors, behind a tile of results."""
MAX_EXPANDED = (SCRATCH_BYTES - FACTORS - 1024) // (2 * 4 * LANES)
"""Groups times vectors of columns whose factors fit there."""
UNIT_BYTES = (8, 2, 2, 4, 2, 4)
"""Of the units of a column, by form."""
CODE_BYTES = (0, 0, 1, 0, 1, 2)
"""Of the codes of a group and column, by form."""


class GroupFactors(NamedTuple):
    """Scales and offsets of the groups of a matrix.

    Attributes:
        form: what units and codes are.
        units: one or two of [out, groups], or of [out, superblocks]; fp16, or fp32.
        codes: up to two of [out, groups] int8.
        zero_point: of all groups.
    """

    form: FactorsForm
    units: tuple[torch.Tensor, ...]
    codes: tuple[torch.Tensor, ...] = ()
    zero_point: int = 0


def compact_factors(weights: GroupedWeights) -> GroupFactors:
    """Returns the scales and offsets of a matrix in the fewest bytes that hold them exactly."""
    if weights.superblocks is not None:
        return _superblocks(weights.superblocks)
    scales, offsets = weights.scales, weights.offsets
    halves = scales.half()
    if not torch.equal(halves.float(), scales):
        return GroupFactors(FactorsForm.FP32, (scales, offsets))
    zeros = _zero_points(scales, offsets)
    zero = int(zeros.max())
    if torch.equal(offsets, -zero * scales):
        return GroupFactors(FactorsForm.SCALES, (halves,), zero_point=zero)
    codes = zeros.clamp(-128, 127).to(torch.int8)
    if torch.equal(offsets, -codes.float() * scales):
        return GroupFactors(FactorsForm.ZERO_POINTS, (halves,), (codes,))
    if torch.equal(offsets.half().float(), offsets):
        return GroupFactors(FactorsForm.SCALES_AND_OFFSETS, (halves, offsets.half()))
    return GroupFactors(FactorsForm.FP32, (scales, offsets))


def _superblocks(blocks: Superblocks) -> GroupFactors:
    units, codes = (blocks.scale_units, blocks.offset_units), (blocks.scale_codes, blocks.offset_codes)
    scale_units, offset_units = (unit.float() for unit in units)
    zero = int(_zero_points(scale_units, offset_units).max())
    if torch.equal(*codes) and torch.equal(offset_units, -zero * scale_units):
        return GroupFactors(FactorsForm.SUPERBLOCKS_OF_SCALES, units[:1], codes[:1], zero)
    return GroupFactors(FactorsForm.SUPERBLOCKS, units, codes)


def _zero_points(scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns the nearest zero points in fp32; 0 where a scale is 0, or the quotient not finite."""
    return (-offsets / scales).round().nan_to_num(0, 0, 0)


def _emit_expand(builder: Any, form: FactorsForm, units: Any, codes: Any, zero_point: Any) -> tuple[Any, Any]:
    """Emits scales and offsets of one group of LANES columns."""

    def unit(number: int) -> Any:
        address = builder.add(units, _I64(2 * LANES * number))
        return emit_fp16_to_fp32(builder, load(builder, address, _HALVES, 2))

    def code(number: int) -> Any:
        address = builder.add(codes, _I64(LANES * number))
        return builder.sitofp(builder.sext(load(builder, address, BYTES, 1), INTS), FLOATS)

    match form:
        case FactorsForm.SCALES_AND_OFFSETS:
            return unit(0), unit(1)
        case FactorsForm.SUPERBLOCKS:
            return builder.fmul(unit(0), code(0)), builder.fmul(unit(1), code(1))
        case FactorsForm.ZERO_POINTS:
            scales, zeros = unit(0), code(0)
        case _:
            scales = unit(0) if form is FactorsForm.SCALES else builder.fmul(unit(0), code(0))
            zeros = broadcast(builder, builder.sitofp(zero_point, ir.FloatType()))
    return scales, builder.fmul(scales, builder.fneg(zeros))


def _expand_group(_typing_context: Any, _form: Any, _units: Any, _codes: Any, _zero_point: Any, _target: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        form, units, codes, zero_point, target = (
            context.cast(builder, *pair, types.int64) for pair in zip(args, signature.args, strict=True)
        )
        end = builder.append_basic_block("end")
        choice = builder.switch(form, end)
        for case in FactorsForm:
            if case is FactorsForm.FP32:
                continue
            block = builder.append_basic_block()
            choice.add_case(_I64(int(case)), block)
            builder.position_at_end(block)
            for number, values in enumerate(_emit_expand(builder, case, units, codes, zero_point)):
                address = builder.add(target, _I64(4 * LANES * number))
                builder.store(values, builder.inttoptr(address, FLOATS.as_pointer())).align = 4
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(_form, _units, _codes, _zero_point, _target), codegen


_expand: Any = intrinsic(_expand_group)


@kernel
def expand_factors(
    form: int, units: int, codes: int, zero_point: int, num_groups: int, num_units: int, num_panels: int, target: int
) -> None:
    """Writes scales and offsets of some columns in fp32, [num_panels, num_groups, 2, LANES].

    Args:
        form: a `FactorsForm` other than FP32.
        units: address of [num_panels, num_units, kinds of units, LANES] fp16.
        codes: address of [num_panels, num_groups, kinds of codes, LANES] int8.
        zero_point: of all groups.
        num_groups: groups of a column.
        num_units: units of a column, which divide its groups.
        num_panels: vectors of columns.
        target: address of the result.
    """
    for _unit in range(num_panels * num_units):
        for _group in range(num_groups // num_units):
            _expand(form, units, codes, zero_point, target)
            codes += CODE_BYTES[form] * LANES
            target += 8 * LANES
        units += UNIT_BYTES[form] * LANES
