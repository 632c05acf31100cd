"""Linear layers: loaded in the format of the checkpoint, then packed for the operations, one matrix at a time."""

from collections.abc import Mapping

import torch

from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint_part import CheckpointPart, Fill, FusedSpan, Span
from engine.model.fp8 import Fp8Weights
from kernels.fp8_block import BLOCK
from kernels.fp8_weights import FP8_DTYPE
from kernels.interface import KernelOps, LinearInput, LinearWeights

_META = torch.device("meta")


class Linear:
    """Weights of y = x W^T + b. Projections of the same input form one matrix, so that one product computes them.

    If ranks hold parts of the columns, y is the sum of their results, to which the first rank adds the bias.
    """

    def __init__(
        self,
        prefix: str,
        in_features: Span,
        out_features: Mapping[str, Span | FusedSpan],
        *,
        bias: bool,
        fp8: Fp8Weights | None,
        dtype: torch.dtype,
        device: torch.device,
        row_order: torch.Tensor | None = None,
    ) -> None:
        """Allocates nothing yet.

        Args:
            prefix: prefix of the names in the checkpoint, such as `model.layers.0.mlp.`.
            in_features: columns.
            out_features: rows of each projection by its name, such as `up_proj`.
            bias: whether the projections have biases.
            fp8: which projections are stored in 8 bits; None: none.
            dtype: dtype of the inputs, and of weights that are not in 8 bits.
            device: device of the weights.
            row_order: [rows] int64, rows in memory from rows of the projections one below the other; None: the same.

        Raises:
            CheckpointError: scales per block with a row_order, only some of the projections in 8 bits, or sizes that
                are no multiples of a block.
            ConfigError: the shards of ranks divide blocks.
        """
        names = [prefix + name for name in out_features]
        in_8_bits = [fp8 is not None and fp8.holds(name) for name in names]
        if any(in_8_bits) and not all(in_8_bits):
            raise CheckpointError(
                f"quantization_config: {', '.join(names)} must all be in 8 bits, or none: they form one matrix; "
                f"{names[in_8_bits.index(False)]} is not"
            )
        self._dtype = dtype
        self._device = device
        self._is_in_8_bits = all(in_8_bits)
        self._has_blocks = self._is_in_8_bits and fp8 is not None and fp8.has_blocks
        self._scale_name = "" if fp8 is None else fp8.scale_name
        self._has_bias = bias
        self._in_features = in_features
        self._out_features = dict(zip(names, out_features.values(), strict=True))
        self._row_order = row_order
        self._packed: LinearWeights = None
        if self._has_blocks:
            if row_order is not None:
                raise CheckpointError(
                    f"quantization_config: weight_block_size [{BLOCK}, {BLOCK}] is not supported for "
                    f"{', '.join(names)} with partial_rotary_factor: use a checkpoint with one scale per channel"
                )
            for name, span in self._out_features.items():
                _check_blocks(name, span, in_features)

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without memory."""
        return self._parts(*self._allocate(_META))

    def load(self, ops: KernelOps, fill: Fill) -> None:
        """Allocates and fills the weights, packs them and frees the memory they were loaded to, unless it is shared."""
        weight, scales, bias = self._allocate(self._device)
        fill(self._parts(weight, scales, bias))
        if self._in_features.start != 0:
            bias = None
        if self._row_order is not None:
            order = self._row_order.to(self._device)
            weight = weight.view(torch.uint8)[order].view(weight.dtype) if self._is_in_8_bits else weight[order]
            scales = None if scales is None else scales[order]
            bias = None if bias is None else bias[order]
        if scales is None:
            self._packed = ops.pack_linear(weight, bias)
        else:
            self._packed = ops.pack_quantized(weight, scales, bias, self._dtype)

    def _allocate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns weights, scales and biases, uninitialised."""
        num_rows, num_columns = sum(span.size for span in self._out_features.values()), self._in_features.size
        dtype = FP8_DTYPE if self._is_in_8_bits else self._dtype
        scales_shape = (num_rows // BLOCK, num_columns // BLOCK) if self._has_blocks else (num_rows,)
        return (
            torch.empty(num_rows, num_columns, dtype=dtype, device=device),
            torch.empty(scales_shape, dtype=torch.float32, device=device) if self._is_in_8_bits else None,
            torch.empty(num_rows, dtype=self._dtype, device=device) if self._has_bias else None,
        )

    def _parts(
        self, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
    ) -> dict[str, CheckpointPart]:
        parts = {}
        start = 0
        for name, span in self._out_features.items():
            rows = slice(start, start + span.size)
            parts[f"{name}.weight"] = CheckpointPart(weight[rows], (span, self._in_features))
            if scales is not None and self._has_blocks:
                block_rows = slice(rows.start // BLOCK, rows.stop // BLOCK)
                spans = (span.in_blocks(BLOCK), self._in_features.in_blocks(BLOCK))
                parts[f"{name}.{self._scale_name}"] = CheckpointPart(scales[block_rows], spans, is_scale=True)
            elif scales is not None:
                parts[f"{name}.{self._scale_name}"] = CheckpointPart(scales[rows], (span,), is_scale=True)
            if bias is not None:
                parts[f"{name}.bias"] = CheckpointPart(bias[rows], (span,))
            start += span.size
        return parts

    def __call__(self, ops: KernelOps, x: LinearInput) -> torch.Tensor:
        """Computes x [T, columns] -> [T, rows]."""
        return ops.linear(x, self._packed)


def _check_blocks(name: str, rows: Span | FusedSpan, columns: Span) -> None:
    """Checks that a projection, or the shard of it that a rank holds, consists of whole blocks."""
    if any(span.total % BLOCK for span in (*rows.parts, columns)):
        raise CheckpointError(
            f"quantization_config: blocks of {BLOCK} x {BLOCK} weights do not divide {name} of {rows.total} rows "
            f"and {columns.total} columns"
        )
    if any(number % BLOCK for span in (*rows.parts, columns) for number in (span.start, span.size)):
        raise ConfigError(
            f"--tensor-parallel-size gives each rank {rows.size} rows and {columns.size} columns of {name}, whose "
            f"scales are per block of {BLOCK} x {BLOCK}: use fewer ranks, so that each has whole blocks"
        )
