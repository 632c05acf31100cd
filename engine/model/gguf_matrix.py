"""A matrix in the blocks of a GGUF file, which is unpacked for the operations when it is loaded."""

import torch

from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint_part import CheckpointPart, Rows, Span
from engine.model.gguf_blocks import unpack
from engine.model.gguf_file import QUANTIZED_TYPES
from engine.model.gguf_weights import GgufWeights
from kernels.grouped_weights import GroupedWeights
from kernels.interface import KernelOps, LinearWeights


class GgufMatrix:
    """Projections, each in blocks of one type; their types may differ."""

    def __init__(
        self, stored: GgufWeights, rows: Rows, columns: Span, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stored, self._dtype = stored, dtype
        self._parts = {}
        for name, span in rows.items():
            block = QUANTIZED_TYPES[stored.kinds[name]]
            num_bytes = columns.in_blocks(block.numbers).times(block.num_bytes)
            memory = torch.empty(span.size, num_bytes.size, dtype=torch.uint8, device=device)
            self._parts[name] = CheckpointPart(memory, (span, num_bytes))

    def parts(self) -> dict[str, CheckpointPart]:
        """Returns the bytes of each projection, [rows, bytes] uint8."""
        return {f"{name}.weight": part for name, part in self._parts.items()}

    def pack(self, ops: KernelOps, bias: torch.Tensor | None, row_order: torch.Tensor | None) -> LinearWeights:
        """Packs the result of `weights`."""
        weights = self.weights()
        if row_order is not None:
            values, scales, offsets = weights.values[row_order], weights.scales[row_order], weights.offsets[row_order]
            weights = weights._replace(values=values, scales=scales, offsets=offsets)
        return ops.pack_grouped(weights, bias, self._dtype)

    def weights(self) -> GroupedWeights:
        """Unpacks the blocks, with the bits and groups that suit all projections, and frees them.

        Raises: CheckpointError: a scale is NaN or infinite.
        """
        num_bits, group_size = self._stored.form(self._parts)
        values, scales, offsets = [], [], []
        for name, part in self._parts.items():
            weights = unpack(self._stored.kinds[name], part.tensor)
            if not (weights.scales.isfinite().all() and weights.offsets.isfinite().all()):
                raise CheckpointError(f"tensor {name}.weight holds NaN or infinity")
            times = weights.group_size // group_size
            values.append(weights.values)
            scales.append(weights.scales.repeat_interleave(times, dim=1))
            offsets.append(weights.offsets.repeat_interleave(times, dim=1))
        self._parts = {}
        return GroupedWeights(torch.cat(values), torch.cat(scales), torch.cat(offsets), num_bits)


def check_gguf_matrix(stored: GgufWeights, rows: Rows, columns: Span) -> None:
    """Checks that a rank holds whole blocks.

    Raises: ConfigError: it does not.
    """
    for name in rows:
        numbers = QUANTIZED_TYPES[stored.kinds[name]].numbers
        if columns.start % numbers or columns.size % numbers:
            raise ConfigError(
                f"--tensor-parallel-size gives each rank {columns.size} inputs of {name}, not a multiple of the "
                f"{numbers} of a block in {stored.kinds[name]}: use fewer ranks"
            )
