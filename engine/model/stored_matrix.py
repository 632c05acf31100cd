"""Matrices of linear layers in the formats of checkpoints: what to read, and how it is packed for the operations."""

from collections.abc import Mapping
from typing import Protocol

import torch

from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint_part import CheckpointPart, FusedSpan, Rows, Span, rows_of, stacked
from engine.model.fp4 import Fp4Weights
from engine.model.fp4_matrix import Fp4Matrix, check_scale_groups, fp4_matrix_shape
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_matrix import GgufMatrix, check_gguf_matrix
from engine.model.gguf_weights import GgufWeights
from engine.model.int_matrix import IntMatrix, check_int_matrix, int_matrix_shape
from engine.model.int_weights import IntWeights
from engine.model.mxfp4 import Mxfp4Weights
from engine.model.quantization_config import QuantizedWeights
from kernels.fp8_weights import FP8_DTYPE, dequantized
from kernels.interface import KernelOps, LinearWeights
from kernels.scale_groups import FP8_BLOCK_SIZE


class StoredMatrix(Protocol):
    """Memory of projections that form one matrix, [rows, columns], in the format of the checkpoint."""

    def parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of this memory that it fills."""
        ...

    def pack(self, ops: KernelOps, bias: torch.Tensor | None, row_order: torch.Tensor | None) -> LinearWeights:
        """Packs the matrix and its bias [rows], which has the order already.

        row_order: [rows] int64, rows of the packed matrix from rows of this one; None: the same.
        """
        ...


class DenseMatrix:
    """Weights that are not quantised."""

    def __init__(self, rows: Rows, columns: Span, dtype: torch.dtype, device: torch.device) -> None:
        self._rows, self._columns = rows, columns
        self._weight = torch.empty(rows_of(rows), columns.size, dtype=dtype, device=device)

    def parts(self) -> dict[str, CheckpointPart]:
        """Returns one part per projection."""
        return {
            f"{name}.weight": CheckpointPart(self._weight[below], (span, self._columns))
            for name, span, below in stacked(self._rows)
        }

    def pack(self, ops: KernelOps, bias: torch.Tensor | None, row_order: torch.Tensor | None) -> LinearWeights:
        """Packs the weights, whose memory the result may share."""
        return ops.pack_linear(self._weight if row_order is None else self._weight[row_order], bias)


class Fp8Matrix:
    """8-bit floats with a scale per row, or per block of 128 x 128 weights."""

    def __init__(self, stored: Fp8Weights, rows: Rows, columns: Span, dtype: torch.dtype, device: torch.device) -> None:
        num_rows = rows_of(rows)
        self._stored, self._rows, self._columns, self._dtype = stored, rows, columns, dtype
        self._values = torch.empty(num_rows, columns.size, dtype=FP8_DTYPE, device=device)
        shape = tuple(-(-n // FP8_BLOCK_SIZE) for n in self._values.shape) if stored.has_blocks else (num_rows,)
        self._scales = torch.empty(shape, dtype=torch.float32, device=device)

    def parts(self) -> dict[str, CheckpointPart]:
        """Returns values and scales of each projection."""
        parts = {}
        for name, span, below in stacked(self._rows):
            parts[f"{name}.weight"] = CheckpointPart(self._values[below], (span, self._columns))
            spans: tuple[Span | FusedSpan, ...] = (span,)
            if self._stored.has_blocks:
                below = slice(below.start // FP8_BLOCK_SIZE, -(-below.stop // FP8_BLOCK_SIZE))
                spans = span.in_blocks(FP8_BLOCK_SIZE), self._columns.in_blocks(FP8_BLOCK_SIZE)
            parts[f"{name}.{self._stored.scale_name}"] = CheckpointPart(self._scales[below], spans, is_scale=True)
        return parts

    def pack(self, ops: KernelOps, bias: torch.Tensor | None, row_order: torch.Tensor | None) -> LinearWeights:
        """Packs values and scales; rows in another order are in no blocks, and are dequantised."""
        values, scales = self._values, self._scales
        if row_order is not None and self._stored.has_blocks:
            return ops.pack_linear(dequantized(values, scales).to(self._dtype)[row_order], bias)
        if row_order is not None:
            values, scales = values.view(torch.uint8)[row_order].view(values.dtype), scales[row_order]
        return ops.pack_quantized(values, scales, bias, self._dtype)


def check_matrix(stored: QuantizedWeights | None, rows: Rows, columns: Span) -> None:
    """Checks that projections of these sizes, or the shards of them that a rank holds, can be loaded as one matrix.

    Raises:
        CheckpointError: sizes that are no multiples of a block, group or word.
        ConfigError: the shards of ranks divide blocks, groups or words.
    """
    if isinstance(stored, IntWeights):
        check_int_matrix(stored, rows, columns)
    if isinstance(stored, GgufWeights):
        check_gguf_matrix(stored, rows, columns)
    if isinstance(stored, Fp4Weights):
        check_scale_groups(", ".join(rows), columns, stored.group_size, stored.format_name)
    if isinstance(stored, Mxfp4Weights):
        raise CheckpointError(
            f"quantization_config: mxfp4 is not supported for {', '.join(rows)}, only for experts that are one tensor, "
            "as those of gpt-oss: serve the checkpoint in 16 bits"
        )
    if not isinstance(stored, Fp8Weights) or not stored.has_blocks:
        return
    for name, span in rows.items():
        if any(part.total % FP8_BLOCK_SIZE for part in (*span.parts, columns)):
            raise CheckpointError(
                f"quantization_config: blocks of {FP8_BLOCK_SIZE} x {FP8_BLOCK_SIZE} weights do not divide {name} of "
                f"{span.total} rows and {columns.total} columns"
            )
        if any(number % FP8_BLOCK_SIZE for part in (*span.parts, columns) for number in (part.start, part.size)):
            raise ConfigError(
                f"--tensor-parallel-size gives each rank {span.size} rows and {columns.size} columns of {name}, whose "
                f"scales are per block of {FP8_BLOCK_SIZE} x {FP8_BLOCK_SIZE}: use fewer ranks, so that each has whole "
                "blocks"
            )


def stored_shape(
    stored: QuantizedWeights, module: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int] | None:
    """Returns rows and columns of a module's matrix by the tensors of a checkpoint; None: it has no quantised one.

    Args:
        stored: how the checkpoint quantises.
        module: name of the module.
        shapes: shapes of all tensors, by their names.
    """
    if isinstance(stored, IntWeights):
        return int_matrix_shape(stored, module, shapes)
    if isinstance(stored, Fp4Weights):
        return fp4_matrix_shape(stored, module, shapes)
    if isinstance(stored, GgufWeights):
        is_stored = stored.holds(module)
    else:
        is_stored = isinstance(stored, Fp8Weights) and f"{module}.{stored.scale_name}" in shapes
    shape = shapes.get(f"{module}.weight", ()) if is_stored else ()
    return (shape[0], shape[1]) if len(shape) == 2 else None


def allocate_matrix(
    stored: QuantizedWeights | None, rows: Rows, columns: Span, dtype: torch.dtype, device: torch.device
) -> StoredMatrix:
    """Allocates projections, uninitialised.

    Args:
        stored: how the checkpoint quantises them; None: not at all.
        rows: rows of each projection.
        columns: the columns of all.
        dtype: of inputs and of weights that are not quantised.
        device: of the memory.
    """
    if stored is None:
        return DenseMatrix(rows, columns, dtype, device)
    if isinstance(stored, IntWeights):
        return IntMatrix(stored, rows, columns, dtype, device)
    if isinstance(stored, GgufWeights):
        return GgufMatrix(stored, rows, columns, dtype, device)
    if isinstance(stored, Fp4Weights):
        return Fp4Matrix(stored, rows, columns, dtype, device)
    assert isinstance(stored, Fp8Weights), "`check_matrix` has refused others"
    return Fp8Matrix(stored, rows, columns, dtype, device)
