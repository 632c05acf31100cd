"""Weights of a checkpoint in integers of 4 or 8 bits, with a scale and an offset per group of inputs."""

from typing import NamedTuple

import torch

_VALUES_AT_A_TIME = 1 << 22


class GroupedWeights(NamedTuple):
    """A matrix [out, in], whose inputs form groups of equal size.

    weight[o, input_order[i]] = values[o, i] * scales[o, i // group_size] + offsets[o, i // group_size]

    Attributes:
        values: [out, in] uint8, below 2 ** num_bits.
        scales: [out, in / group_size] fp32.
        offsets: [out, in / group_size] fp32: - zero point * scale.
        num_bits: 4 or 8.
        input_order: [in] int64; None: the groups are of inputs in their order.
        quantizes_inputs: whether the checkpoint is meant for inputs in int8 with a scale per token.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    num_bits: int
    input_order: torch.Tensor | None = None
    quantizes_inputs: bool = False

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def is_int8_per_row(self) -> bool:
        """Whether the matrix is int8 with one scale per row and no other zero point than 0."""
        is_whole = self.num_bits == 8 and self.scales.shape[1] == 1 and self.input_order is None
        return is_whole and torch.equal(self.offsets, -128 * self.scales)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix, each weight computed in fp64 and rounded to fp32, then to dtype."""
        num_out, num_in = self.values.shape
        out = torch.empty(num_out, num_in, dtype=dtype, device=self.values.device)
        num_rows = max(1, _VALUES_AT_A_TIME // num_in)
        for rows in (slice(start, start + num_rows) for start in range(0, num_out, num_rows)):
            values = self.values[rows].double().view(-1, self.scales.shape[1], self.group_size)
            exact = values * self.scales[rows, :, None] + self.offsets[rows, :, None]
            out[rows, slice(None) if self.input_order is None else self.input_order] = (
                exact.float().view(-1, num_in).to(dtype)
            )
        return out


def packed_bytes(num_rows: int, num_columns: int, num_bits: int, group_size: int | None) -> int:
    """Returns the bytes of a matrix in memory: integers, and a scale and an offset per group; None: one group."""
    return num_rows * (num_columns * num_bits // 8 + 8 * (num_columns // (group_size or num_columns)))
