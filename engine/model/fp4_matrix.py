"""Matrices in 4-bit floats, from the layouts of ModelOpt and compressed-tensors.

Codes are of E2M1, two in a byte, that of the first input in the low half. Tensors of a projection:

| layout | codes [out, in / 2] | scales s of groups | scale t of the tensor | a weight is its code's value times |
|---|---|---|---|---|
| modelopt | weight | weight_scale [out, in / 16], E4M3 | weight_scale_2 | s * t |
| nvfp4 | weight_packed | weight_scale [out, in / 16], E4M3 | weight_global_scale | s * (1 / t) |
| mxfp4 | weight_packed | weight_scale [out, in / 32], exponents | | 2 ** (s - 127) |

Each product and the reciprocal are rounded to fp32.
"""

from collections.abc import Mapping

import torch

from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint_part import CheckpointPart, Rows, Span, rows_of, stacked
from engine.model.fp4 import Fp4Weights
from kernels.fp8_weights import FP8_DTYPE
from kernels.interface import KernelOps, LinearWeights
from kernels.microscaled_weights import NAN, MicroscaledWeights, NvFp4Weights

_E4M3_NAN = 127
_CODES = {"modelopt": "weight", "nvfp4": "weight_packed", "mxfp4": "weight_packed"}
_GROUP_SCALES = "weight_scale"
_TENSOR_SCALES = {"modelopt": "weight_scale_2", "nvfp4": "weight_global_scale"}


class Fp4Matrix:
    """Codes with a scale per group of inputs, and often one per projection."""

    def __init__(self, stored: Fp4Weights, rows: Rows, columns: Span, dtype: torch.dtype, device: torch.device) -> None:
        num_rows = rows_of(rows)
        self._stored, self._rows, self._columns, self._dtype = stored, rows, columns, dtype
        self._codes = torch.empty(num_rows, columns.size // 2, dtype=torch.uint8, device=device)
        scale_dtype = torch.uint8 if stored.layout == "mxfp4" else FP8_DTYPE
        self._scales = torch.empty(num_rows, columns.size // stored.group_size, dtype=scale_dtype, device=device)
        self._row_scales = torch.empty(num_rows, dtype=torch.float32, device=device)

    def parts(self) -> dict[str, CheckpointPart]:
        """Returns codes and scales of each projection."""
        parts, layout = {}, self._stored.layout
        for name, span, below in stacked(self._rows):
            parts[f"{name}.{_CODES[layout]}"] = CheckpointPart(self._codes[below], (span, self._columns.in_blocks(2)))
            groups = self._columns.in_blocks(self._stored.group_size)
            parts[f"{name}.{_GROUP_SCALES}"] = CheckpointPart(self._scales[below], (span, groups))
            if layout != "mxfp4":
                scales = CheckpointPart(self._row_scales[below], (span,), is_scale=True)
                parts[f"{name}.{_TENSOR_SCALES[layout]}"] = scales
        return parts

    def pack(self, ops: KernelOps, bias: torch.Tensor | None, row_order: torch.Tensor | None) -> LinearWeights:
        """Packs the codes as they are.

        Raises: CheckpointError: a scale of a group is NaN or below zero, or that of a tensor not finite.
        """
        self._check_group_scales()
        codes, scales, row_scales = self._codes, self._scales.view(torch.uint8), self._finite_row_scales()
        if row_order is not None:
            codes, scales, row_scales = codes[row_order], scales[row_order], row_scales[row_order]
        if self._stored.layout != "mxfp4":
            return ops.pack_fp4(NvFp4Weights(codes, scales.view(FP8_DTYPE), row_scales), bias, self._dtype)
        weights = MicroscaledWeights(codes, scales)
        if self._stored.is_microscaled(self._rows):
            return ops.pack_microscaled(weights, bias, self._dtype)
        return ops.pack_fp4(weights, bias, self._dtype)

    def _check_group_scales(self) -> None:
        least_wrong, what = _E4M3_NAN, "NaN or a number below 0"
        if self._stored.layout == "mxfp4":
            least_wrong, what = NAN, "NaN"
        for name, _, below in stacked(self._rows):
            if bool((self._scales[below].view(torch.uint8) >= least_wrong).any()):
                raise CheckpointError(f"tensor {name}.{_GROUP_SCALES} holds {what}")

    def _finite_row_scales(self) -> torch.Tensor:
        layout = self._stored.layout
        if layout == "mxfp4":
            return self._row_scales
        scales = self._row_scales.reciprocal() if layout == "nvfp4" else self._row_scales
        for name, _, below in stacked(self._rows):
            if not bool(scales[below].isfinite().all()):
                wrong = self._row_scales[below][~scales[below].isfinite()][0].item()
                raise CheckpointError(f"tensor {name}.{_TENSOR_SCALES[layout]} is {wrong:g}, no scale of weights")
        return scales


def check_scale_groups(names: str, columns: Span, size: int, format_name: str) -> None:
    """Checks that groups divide the inputs, and those of a rank.

    Args:
        names: of the matrices.
        columns: their inputs.
        size: inputs that share a scale.
        format_name: of the numbers.

    Raises:
        CheckpointError: they do not divide the inputs of the matrix.
        ConfigError: they do not divide those of a rank.
    """
    if columns.total % size:
        raise CheckpointError(
            f"quantization_config: {names} has {columns.total} inputs, not a multiple of the {size} that share a scale "
            f"in {format_name}"
        )
    if columns.start % size or columns.size % size:
        raise ConfigError(
            f"--tensor-parallel-size gives each rank {columns.size} inputs of {names}, not a multiple of the {size} "
            f"that share a scale in {format_name}: use fewer ranks"
        )


def fp4_matrix_shape(stored: Fp4Weights, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """Returns rows and columns of a module's matrix by the shapes of tensors; None: it is not in 4-bit floats."""
    shape = shapes.get(f"{module}.{_CODES[stored.layout]}", ())
    if f"{module}.{_GROUP_SCALES}" not in shapes or len(shape) != 2:
        return None
    return shape[0], 2 * shape[1]
