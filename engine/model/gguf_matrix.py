"""A matrix in the blocks of a GGUF file, which is unpacked for the operations when it is loaded."""

from collections.abc import Iterable

import torch

from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint_part import CheckpointPart, Rows, Span, rows_of, stacked
from engine.model.gguf_blocks import microscaled, unpack
from engine.model.gguf_file import QUANTIZED_TYPES
from engine.model.gguf_weights import GgufWeights
from kernels.grouped_weights import GroupedWeights, Superblocks
from kernels.interface import KernelOps, LinearWeights
from kernels.microscaled_weights import NAN, MicroscaledWeights

_VALUES_AT_A_TIME = 1 << 18
"""Unpacked together, so that unpacking needs little memory besides its result."""


class GgufMatrix:
    """Projections, each in blocks of one type; their types may differ."""

    def __init__(
        self, stored: GgufWeights, rows: Rows, columns: Span, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stored, self._rows, self._columns, self._dtype = stored, rows, columns, dtype
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
        """Packs the result of `weights`, or an expert's codes in MXFP4 as they are."""
        if self._stored.is_microscaled(self._rows):
            assert row_order is None, "experts have no rotated heads"
            return ops.pack_microscaled(self._microscaled(), bias, self._dtype)
        return ops.pack_grouped(self.weights(row_order), bias, self._dtype)

    def weights(self, row_order: torch.Tensor | None = None) -> GroupedWeights:
        """Unpacks the blocks, with the bits and groups that suit all projections, and frees them.

        row_order: see `StoredMatrix.pack`.
        Raises: CheckpointError: a scale is NaN or infinite.
        """
        num_bits, group_size = self._stored.form(self._rows)
        num_columns, device = self._columns.size, next(iter(self._parts.values())).tensor.device
        values = torch.empty(rows_of(self._rows), num_columns, dtype=torch.uint8, device=device)
        places = None if row_order is None else row_order.argsort()  # in memory, of rows in the file
        num_at_a_time = max(1, _VALUES_AT_A_TIME // num_columns)
        scales, offsets, superblocks = [], [], []
        for name, _, below in stacked(self._rows):
            part = self._parts[name].tensor
            for first in range(0, len(part), num_at_a_time):
                blocks = part[first : first + num_at_a_time]
                weights = unpack(self._stored.kinds[name], blocks).in_groups_of(group_size)
                if not (weights.scales.isfinite().all() and weights.offsets.isfinite().all()):
                    raise CheckpointError(f"tensor {name}.weight holds NaN or infinity")
                rows = slice(below.start + first, below.start + first + len(blocks))
                values[rows if places is None else places[rows]] = weights.values
                scales.append(weights.scales)
                offsets.append(weights.offsets)
                superblocks.append(weights.superblocks)
        self._parts = {}

        def whole(numbers: Iterable[torch.Tensor]) -> torch.Tensor:
            together = torch.cat(list(numbers))
            return together if row_order is None else together[row_order]

        are_all = [blocks for blocks in superblocks if blocks is not None]
        of_all = Superblocks(*map(whole, zip(*are_all, strict=True))) if len(are_all) == len(superblocks) else None
        return GroupedWeights(values, whole(scales), whole(offsets), num_bits, superblocks=of_all)

    def _microscaled(self) -> MicroscaledWeights:
        matrices = []
        for name, part in self._parts.items():
            matrices.append(microscaled(part.tensor))
            if bool((matrices[-1].exponents == NAN).any()):
                raise CheckpointError(f"tensor {name}.weight holds NaN or infinity")
        self._parts = {}
        return MicroscaledWeights(*(torch.cat(numbers) for numbers in zip(*matrices, strict=True)))


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
