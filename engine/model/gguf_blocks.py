"""Unpacks the blocks of GGUF files into integers with a scale and an offset per group of inputs.

Layouts are those of ggml (ggml-common.h, ggml-quants.c). All numbers of a type have the form integer * scale + offset:
K-quants are superblocks of 256 numbers: their 8 or 16 groups have scales and offsets in a few bits, times two fp16
numbers.
"""

from collections.abc import Callable

import torch

from engine.model.gguf_file import QUANTIZED_TYPES
from kernels.grouped_weights import GroupedWeights, Superblocks
from kernels.microscaled_weights import MicroscaledWeights

_Unpacked = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | Superblocks]
"""Integers [blocks, numbers] uint8, and scales and offsets [blocks, 1] fp32, or superblocks of one block each."""


def unpack(kind: str, data: torch.Tensor) -> GroupedWeights:
    """Unpacks rows of a matrix.

    Args:
        kind: name of a type of `QUANTIZED_TYPES`.
        data: [rows, bytes] uint8: whole blocks.
    Returns: the rows, with the bits and groups of the type.
    """
    block = QUANTIZED_TYPES[kind]
    num_rows = len(data)
    values, factors = _UNPACK[kind](data.reshape(-1, block.num_bytes))
    values = values.view(num_rows, -1)
    if isinstance(factors, Superblocks):
        superblocks = Superblocks(*(numbers.reshape(num_rows, -1) for numbers in factors))
        return GroupedWeights(values, superblocks.scales, superblocks.offsets, block.num_bits, superblocks=superblocks)
    scales, offsets = (numbers.reshape(num_rows, -1) for numbers in factors)
    return GroupedWeights(values, scales, offsets, block.num_bits)


def _half(data: torch.Tensor, start: int) -> torch.Tensor:
    """Returns the fp16 number at a byte of each block, [blocks, 1]."""
    return data[:, start : start + 2].contiguous().view(torch.float16)


def _scale(data: torch.Tensor) -> torch.Tensor:
    """Returns the number that blocks of 32 begin with, [blocks, 1] fp32."""
    return _half(data, 0).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Returns the low halves of all bytes [blocks, n] before the high ones, [blocks, 2 n]."""
    return torch.cat((data & 15, data >> 4), dim=1)


def _bits(data: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Returns fields of bits [blocks, 8 / num_bits, n] of bytes [blocks, n], the lowest first."""
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8, device=data.device)
    return (data[:, None, :] >> shifts[:, None]) & ((1 << num_bits) - 1)


def _q4_0(data: torch.Tensor) -> _Unpacked:
    scale = _scale(data)
    return _nibbles(data[:, 2:]), (scale, -8 * scale)


def _q4_1(data: torch.Tensor) -> _Unpacked:
    return _nibbles(data[:, 4:]), (_scale(data), _half(data, 2).float())


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Returns 32 bits of 4 bytes [blocks, 4] in their order, as 16."""
    return (_bits(data, 1).transpose(1, 2).reshape(-1, 32)) << 4


def _q5_0(data: torch.Tensor) -> _Unpacked:
    scale = _scale(data)
    return _nibbles(data[:, 6:]) | _fifth_bits(data[:, 2:6]), (scale, -16 * scale)


def _q5_1(data: torch.Tensor) -> _Unpacked:
    return _nibbles(data[:, 8:]) | _fifth_bits(data[:, 4:8]), (_scale(data), _half(data, 2).float())


def _q8_0(data: torch.Tensor) -> _Unpacked:
    scale = _scale(data)
    return data[:, 2:] ^ 128, (scale, -128 * scale)  # signed to unsigned


def _scales_and_mins(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 8 scales and 8 minima of 6 bits, [blocks, 8] int8 each, from 12 bytes."""
    low, high = data[:, :4], data[:, 4:8]
    rest = data[:, 8:12]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 6) << 4)), dim=1)
    minima = torch.cat((high & 63, (rest >> 4) | ((high >> 6) << 4)), dim=1)
    return scales.to(torch.int8), minima.to(torch.int8)


def _pairs_of_32(data: torch.Tensor) -> torch.Tensor:
    """Returns 256 half bytes of 128 bytes: of each 32 bytes the low halves, then the high ones."""
    return _bits(data.reshape(-1, 32), 4).reshape(-1, 256)


def _q4_k(data: torch.Tensor) -> _Unpacked:
    scales, minima = _scales_and_mins(data[:, 4:16])
    return _pairs_of_32(data[:, 16:]), Superblocks(_half(data, 0), scales, -_half(data, 2), minima)


def _q5_k(data: torch.Tensor) -> _Unpacked:
    scales, minima = _scales_and_mins(data[:, 4:16])
    fifth = _bits(data[:, 16:48], 1).reshape(-1, 256) << 4
    return _pairs_of_32(data[:, 48:]) | fifth, Superblocks(_half(data, 0), scales, -_half(data, 2), minima)


def _q6_k(data: torch.Tensor) -> _Unpacked:
    low = _bits(data[:, :128].reshape(-1, 64), 4).reshape(-1, 256)
    high = _bits(data[:, 128:192].reshape(-1, 32), 2).reshape(-1, 256)
    scales = data[:, 192:208].contiguous().view(torch.int8)
    return low | (high << 4), _with_zero_point(_half(data, 208), scales, 32)


def _q2_k(data: torch.Tensor) -> _Unpacked:
    values = _bits(data[:, 16:80].reshape(-1, 32), 2).reshape(-1, 256)
    scales, minima = (numbers.to(torch.int8) for numbers in (data[:, :16] & 15, data[:, :16] >> 4))
    return values, Superblocks(_half(data, 80), scales, -_half(data, 82), minima)


def _q3_k(data: torch.Tensor) -> _Unpacked:
    low = _bits(data[:, 32:96].reshape(-1, 32), 2).reshape(-1, 256)
    third = _bits(data[:, :32], 1).reshape(-1, 256)
    packed = data[:, 96:108]
    high = _bits(packed[:, 8:], 2).reshape(-1, 16)
    six_bits = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), dim=1) | (high << 4)
    return low | (third << 2), _with_zero_point(_half(data, 108), six_bits.to(torch.int8) - 32, 4)


def _with_zero_point(units: torch.Tensor, scales: torch.Tensor, zero: int) -> Superblocks:
    """Returns superblocks with this zero point, whose product with units is below 65,504."""
    return Superblocks(units, scales, -zero * units, scales)


_STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What 4 bits of IQ4_NL and IQ4_XS stand for."""

_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What 4 bits of MXFP4 stand for, in halves."""


def _of_table(codes: torch.Tensor, table: tuple[int, ...]) -> torch.Tensor:
    """Returns integers of codes as unsigned ones, 128 more."""
    return torch.tensor([128 + value for value in table], dtype=torch.uint8, device=codes.device)[codes.int()]


def _iq4_nl(data: torch.Tensor) -> _Unpacked:
    scale = _scale(data)
    return _of_table(_nibbles(data[:, 2:]), _STEPS), (scale, -128 * scale)


def _iq4_xs(data: torch.Tensor) -> _Unpacked:
    low, high = _bits(data[:, 4:8], 4).transpose(1, 2).reshape(-1, 8), _bits(data[:, 2:4], 2).transpose(1, 2)
    scales = (low | (high.reshape(-1, 8) << 4)).to(torch.int8) - 32
    codes = _bits(data[:, 8:].reshape(-1, 16), 4).reshape(-1, 256)
    return _of_table(codes, _STEPS), _with_zero_point(_half(data, 0), scales, 128)


def _mxfp4(data: torch.Tensor) -> _Unpacked:
    exponents = data[:, :1]
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 128)
    scales = torch.where(exponents == 255, torch.nan, scales)
    return _of_table(_nibbles(data[:, 1:]), _MXFP4), (scales, -128 * scales)


def microscaled(data: torch.Tensor) -> MicroscaledWeights:
    """Returns rows [rows, bytes] uint8 of blocks in MXFP4 with the same codes and exponents in another order."""
    blocks = data.view(len(data), -1, QUANTIZED_TYPES["MXFP4"].num_bytes)
    halves = blocks[:, :, 1:].view(len(data), blocks.shape[1], 8, 2)  # bytes of neighbours
    first, second = halves[..., 0], halves[..., 1]
    codes = torch.cat(((first & 15) | (second << 4), (first >> 4) | (second & 0xF0)), dim=2)
    return MicroscaledWeights(codes.view(len(data), -1), blocks[:, :, 0].contiguous())


_UNPACK: dict[str, Callable[[torch.Tensor], _Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
