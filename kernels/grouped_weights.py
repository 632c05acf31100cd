"""Weights of a checkpoint in integers of up to 8 bits, with a scale and an offset per group of inputs."""

from typing import NamedTuple

import torch

_VALUES_AT_A_TIME = 1 << 22


class Superblocks(NamedTuple):
    """Scales and offsets of groups as small integers times numbers of several groups, as GGUF's K-quants have them.

    scales[o, g] = scale_units[o, g // n] * scale_codes[o, g], with n groups of a superblock; offsets likewise.

    Attributes:
        scale_units, offset_units: [out, superblocks] fp16.
        scale_codes, offset_codes: [out, groups] int8.
    """

    scale_units: torch.Tensor
    scale_codes: torch.Tensor
    offset_units: torch.Tensor
    offset_codes: torch.Tensor

    @property
    def scales(self) -> torch.Tensor:
        """Scales of groups, [out, groups] fp32, exact."""
        return _products(self.scale_units, self.scale_codes)

    @property
    def offsets(self) -> torch.Tensor:
        """Offsets of groups, [out, groups] fp32, exact."""
        return _products(self.offset_units, self.offset_codes)


class GroupedWeights(NamedTuple):
    """A matrix [out, in], whose inputs form groups of equal size.

    weight[o, input_order[i]] = values[o, i] * scales[o, i // group_size] + offsets[o, i // group_size]

    Attributes:
        values: [out, in] uint8, below 2 ** num_bits.
        scales: [out, in / group_size] fp32.
        offsets: [out, in / group_size] fp32: - zero point * scale.
        num_bits: 4, 5, 6 or 8.
        input_order: [in] int64; None: the groups are of inputs in their order.
        quantizes_inputs: whether the checkpoint is meant for inputs in int8 with a scale per token.
        superblocks: the same scales and offsets in fewer bytes; None: the checkpoint has no superblocks.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    num_bits: int
    input_order: torch.Tensor | None = None
    quantizes_inputs: bool = False
    superblocks: Superblocks | None = None

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def is_int8_per_row(self) -> bool:
        """Whether the matrix is int8 with one scale per row and no other zero point than 0."""
        is_whole = self.num_bits == 8 and self.scales.shape[1] == 1 and self.input_order is None
        return is_whole and torch.equal(self.offsets, -128 * self.scales)

    def in_groups_of(self, size: int) -> "GroupedWeights":
        """Returns the same weights in groups of fewer inputs, of which a group has a multiple."""
        times = self.group_size // size
        if times == 1:
            return self
        blocks = self.superblocks
        if blocks is not None:
            blocks = blocks._replace(
                scale_codes=blocks.scale_codes.repeat_interleave(times, dim=1),
                offset_codes=blocks.offset_codes.repeat_interleave(times, dim=1),
            )
        scales, offsets = (numbers.repeat_interleave(times, dim=1) for numbers in (self.scales, self.offsets))
        return self._replace(scales=scales, offsets=offsets, superblocks=blocks)

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


def _products(units: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    num_out, num_units = units.shape
    return (units.float()[:, :, None] * codes.view(num_out, num_units, -1)).view(codes.shape)
