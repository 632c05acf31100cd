"""Linear layers: loaded in the format of the checkpoint, then packed for the operations, one matrix at a time."""

from collections.abc import Collection, Mapping
from typing import Protocol, TypeAlias

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_part import CheckpointPart, Fill, FusedSpan, Recall, Span, pack_anew, rows_of, stacked
from engine.model.fp4 import Fp4Weights
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_weights import GgufWeights
from engine.model.linear_adapters import LinearAdapters
from engine.model.quantization_config import QuantizedWeights
from engine.model.stored_matrix import StoredMatrix, allocate_matrix, check_matrix
from kernels.interface import KernelOps, LinearInput, LinearWeights
from kernels.metadata import AdaptedTokens

Kept: TypeAlias = tuple[type[QuantizedWeights], ...]
"""Kinds of quantised weights of a checkpoint that are packed as they are; others are dequantised."""

_META = torch.device("meta")


class Linear:
    """Weights of y = x W^T + b. Projections of the same input form one matrix, so that one product computes them.

    If ranks hold parts of the columns, y is the sum of their results, to which the first rank adds the bias.

    Attributes:
        adapters: of the projections, by their names in the checkpoint.
    """

    def __init__(
        self,
        prefix: str,
        in_features: Span,
        out_features: Mapping[str, Span | FusedSpan],
        *,
        bias: bool,
        quantized: QuantizedWeights | None,
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
            quantized: how the checkpoint quantises projections, and which; None: none.
            dtype: dtype of the inputs, and of weights that are not quantised.
            device: device of the weights.
            row_order: [rows] int64, rows in memory from rows of the projections one below the other; None: the same.

        Raises:
            CheckpointError: only some of the projections are quantised; or see `check_matrix`.
            ConfigError: see `check_matrix`.
        """
        names = [prefix + name for name in out_features]
        are_quantized = [quantized is not None and quantized.holds(name) for name in names]
        if any(are_quantized) and not all(are_quantized):
            raise CheckpointError(
                f"quantization_config: {', '.join(names)} must all be quantised, or none: they form one matrix; "
                f"{names[are_quantized.index(False)]} is not"
            )
        self._quantized = quantized if all(are_quantized) else None
        self._dtype = dtype
        self._device = device
        self._has_bias = bias
        self._in_features = in_features
        self._out_features = dict(zip(names, out_features.values(), strict=True))
        self._row_order = row_order
        self._packed: LinearWeights = None
        below = {name: rows for name, _, rows in stacked(self._out_features)}
        self.adapters = LinearAdapters(in_features.total, below, row_order)
        check_matrix(self._quantized, self._out_features, in_features)

    @property
    def names(self) -> Collection[str]:
        """Names of its projections in the checkpoint."""
        return self._out_features.keys()

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint quantises it."""
        return self._quantized is not None

    def take_packed(self) -> list[LinearWeights]:
        """Returns the packed weights after `load`, and forgets them: an operation on several layers holds them."""
        packed, self._packed = self._packed, None
        return [packed]

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without memory."""
        matrix, bias = self._allocate(_META)
        return matrix.parts() | self._bias_parts(bias)

    def load(self, ops: KernelOps, fill: Fill, recall: Recall = pack_anew) -> None:
        """Allocates and fills the weights, packs them and frees the memory they were loaded to, unless it is shared.

        None of this is done for weights that are recalled.
        """
        self._packed = recall(next(iter(self._out_features)), lambda: self._load(ops, fill))

    def _load(self, ops: KernelOps, fill: Fill) -> LinearWeights:
        matrix, bias = self._allocate(self._device)
        fill(matrix.parts() | self._bias_parts(bias))
        if self._in_features.start != 0:
            bias = None
        order = None if self._row_order is None else self._row_order.to(self._device)
        if bias is not None and order is not None:
            bias = bias[order]
        return matrix.pack(ops, bias, order)

    def packed_bytes(self, *, is_quantized_on_load: bool, kept: Kept = (), is_compact: bool = False) -> int:
        """Returns the bytes of the packed weights.

        Args:
            is_quantized_on_load: whether weights that are not kept become 8 bits with a scale per row, or else dtype.
            kept: kinds of quantised weights that stay as they are.
            is_compact: whether they take as little memory as on a CPU, see their `packed_bytes`.
        """
        num_rows, num_columns = rows_of(self._out_features), self._in_features.size
        num_weights = num_rows * num_columns
        num_bytes = num_rows * self._dtype.itemsize if self._has_bias else 0
        stored = self._quantized
        is_microscaled = isinstance(stored, GgufWeights) and stored.is_microscaled(self._out_features)
        is_requantized = is_quantized_on_load and (is_microscaled or (isinstance(stored, Fp4Weights) and is_compact))
        loses_blocks = self._row_order is not None and isinstance(stored, Fp8Weights) and stored.has_blocks
        if isinstance(stored, kept) and not is_requantized and not loses_blocks:
            return num_bytes + stored.packed_bytes(self._out_features, num_rows, num_columns, is_compact=is_compact)
        if is_quantized_on_load:
            return num_bytes + num_weights + 4 * num_rows
        return num_bytes + num_weights * self._dtype.itemsize

    def _allocate(self, device: torch.device) -> tuple[StoredMatrix, torch.Tensor | None]:
        """Returns weights and biases, uninitialised."""
        matrix = allocate_matrix(self._quantized, self._out_features, self._in_features, self._dtype, device)
        num_rows = rows_of(self._out_features)
        return matrix, torch.empty(num_rows, dtype=self._dtype, device=device) if self._has_bias else None

    def _bias_parts(self, bias: torch.Tensor | None) -> dict[str, CheckpointPart]:
        if bias is None:
            return {}
        return {
            f"{name}.bias": CheckpointPart(bias[below], (span,)) for name, span, below in stacked(self._out_features)
        }

    def __call__(self, ops: KernelOps, x: LinearInput, adapted: AdaptedTokens | None = None) -> torch.Tensor:
        """Computes x [T, columns] -> [T, rows]; tokens with an adapter get its change too."""
        y = ops.linear(x, self._packed)
        if adapted is not None:
            self.adapters.add(y, x, adapted)
        return y


class LinearFactory(Protocol):
    """Makes linear layers of one model, in its formats; parameters are those of `Linear`."""

    def __call__(
        self,
        prefix: str,
        in_features: Span,
        out_features: Mapping[str, Span | FusedSpan],
        *,
        bias: bool,
        row_order: torch.Tensor | None = None,
    ) -> Linear:
        """Returns a layer without memory."""
        ...
