"""Weights of a checkpoint in 4-bit floats (E2M1), with a small float as the scale of a few inputs: MXFP4 and NVFP4."""

from typing import NamedTuple

import torch

from kernels.grouped_weights import GroupedWeights

NAN = 255
"""An exponent that stands for NaN."""

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes of E2M1 from 0 to 7; codes from 8 on are these with a minus."""

_VALUES_AT_A_TIME = 1 << 22
_MIDDLE = 128


class MicroscaledWeights(NamedTuple):
    """A matrix [out, in] in MXFP4 (OCP Microscaling Formats 1.0, sections 5.2 and 6.3).

    weight[o, i] = E2M1 value of the code of input i * 2 ** (exponents[o, i // 32] - 127)

    Attributes:
        codes: [out, in / 2] uint8, an even input in the low half of a byte, the next one in the high half.
        exponents: [out, in / 32] uint8, below `NAN`.
    """

    codes: torch.Tensor
    exponents: torch.Tensor

    @property
    def in_features(self) -> int:
        """Inputs."""
        return 2 * self.codes.shape[1]

    @property
    def factors(self) -> torch.Tensor:
        """Scales of groups, [out, groups] fp32, exact."""
        return torch.exp2(self.exponents.double() - 127).float()

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix, [out, in]; fp32 and bf16 are exact, but for bf16 below its smallest number."""
        return _dequantized(self, dtype)

    def grouped(self) -> GroupedWeights:
        """Returns the same weights as integers."""
        return _grouped(self)


class NvFp4Weights(NamedTuple):
    """A matrix [out, in] in NVFP4 (arXiv:2509.25149, section 2).

    weight[o, i] = E2M1 value of the code of input i * (scales[o, i // 16] * row_scales[o])

    Each of the two products is rounded to fp32.

    Attributes:
        codes: [out, in / 2] uint8, an even input in the low half of a byte, the next one in the high half.
        scales: [out, in / 16] float8_e4m3fn, neither NaN nor below zero.
        row_scales: [out] fp32: the scale of the tensor that a row comes from.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    row_scales: torch.Tensor

    @property
    def in_features(self) -> int:
        """Inputs."""
        return 2 * self.codes.shape[1]

    @property
    def factors(self) -> torch.Tensor:
        """Scales of groups, [out, groups] fp32: products of two, rounded."""
        return self.scales.float() * self.row_scales[:, None]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix, [out, in], computed in fp32 and then rounded to dtype."""
        return _dequantized(self, dtype)

    def grouped(self) -> GroupedWeights:
        """Returns the same weights as integers."""
        return _grouped(self)


Fp4Weights = MicroscaledWeights | NvFp4Weights


def _dequantized(weights: Fp4Weights, dtype: torch.dtype) -> torch.Tensor:
    num_out, num_in = weights.codes.shape[0], weights.in_features
    factors = weights.factors
    out = torch.empty(num_out, num_in, dtype=dtype, device=weights.codes.device)
    for rows in _some_rows(num_out, num_in):
        exact = _numbers(weights.codes[rows], 1.0).view(-1, factors.shape[1], num_in // factors.shape[1])
        out[rows] = (exact * factors[rows, :, None]).view(-1, num_in).to(dtype)
    return out


def _grouped(weights: Fp4Weights) -> GroupedWeights:
    """Twice the value of a code is an integer of 8 bits, with a zero point that makes offsets exact: a power of two."""
    num_out, num_in = weights.codes.shape[0], weights.in_features
    values = torch.empty(num_out, num_in, dtype=torch.uint8, device=weights.codes.device)
    for rows in _some_rows(num_out, num_in):
        values[rows] = (_numbers(weights.codes[rows], 2.0) + _MIDDLE).to(torch.uint8)
    scales = weights.factors / 2
    return GroupedWeights(values, scales, -_MIDDLE * scales, num_bits=8)


def _numbers(codes: torch.Tensor, factor: float) -> torch.Tensor:
    """[rows, in / 2] -> the values of codes times a factor, [rows, in] fp32."""
    values = factor * torch.tensor(VALUES + tuple(-value for value in VALUES), device=codes.device)
    return values[torch.stack((codes & 15, codes >> 4), dim=-1).long()].flatten(1)


def _some_rows(num_out: int, num_in: int) -> list[slice]:
    num_rows = max(1, _VALUES_AT_A_TIME // num_in)
    return [slice(start, start + num_rows) for start in range(0, num_out, num_rows)]
