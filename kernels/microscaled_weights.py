"""Weights of a checkpoint in 4-bit floats, with a power of two as the scale of every 32 inputs: MXFP4."""

from typing import NamedTuple

import torch

GROUP_SIZE = 32
"""Inputs that share a scale."""

NAN = 255
"""An exponent that stands for NaN."""

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes of E2M1 from 0 to 7; codes from 8 on are these with a minus."""

_VALUES_AT_A_TIME = 1 << 22


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

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix, [out, in]; fp32 and bf16 are exact, but for bf16 below its smallest number."""
        num_out, num_in = self.codes.shape[0], self.in_features
        values = torch.tensor(VALUES + tuple(-value for value in VALUES), device=self.codes.device)
        out = torch.empty(num_out, num_in, dtype=dtype, device=self.codes.device)
        num_rows = max(1, _VALUES_AT_A_TIME // num_in)
        for rows in (slice(start, start + num_rows) for start in range(0, num_out, num_rows)):
            codes = torch.stack((self.codes[rows] & 15, self.codes[rows] >> 4), dim=-1)
            exact = values[codes.long()].view(len(codes), -1, GROUP_SIZE)
            exact = exact * torch.exp2(self.exponents[rows, :, None].double() - 127).float()
            out[rows] = exact.view(-1, num_in).to(dtype)
        return out
