"""Linear layers: loaded in the format of the checkpoint, then packed into the format of the operations."""

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_part import CheckpointPart, Span
from engine.model.fp8 import FP8_DTYPE, Fp8Weights
from kernels.interface import KernelOps, LinearInput, LinearWeights


class Linear:
    """Weights of y = x W^T + b. Projections of the same input form one matrix, so that one product computes them.

    If ranks hold parts of the columns, y is the sum of their results, to which the first rank adds the bias.
    """

    def __init__(
        self,
        prefix: str,
        in_features: Span,
        out_features: dict[str, Span],
        *,
        bias: bool,
        fp8: Fp8Weights | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates the weights.

        Args:
            prefix: prefix of the names in the checkpoint, such as `model.layers.0.mlp.`.
            in_features: columns.
            out_features: rows of each projection by its name, such as `up_proj`.
            bias: whether the projections have biases.
            fp8: which projections are stored in 8 bits; None: none.
            dtype: dtype of the inputs, and of weights that are not in 8 bits.
            device: device of the weights.
        Raises: CheckpointError: only some of the projections are in 8 bits.
        """
        names = [prefix + name for name in out_features]
        in_8_bits = [fp8 is not None and fp8.holds(name) for name in names]
        if any(in_8_bits) and not all(in_8_bits):
            raise CheckpointError(
                f"quantization_config: {', '.join(names)} must all be in 8 bits, or none: they form one matrix; "
                f"{names[in_8_bits.index(False)]} is not"
            )
        num_rows = sum(span.size for span in out_features.values())
        self._dtype = dtype
        self._in_features = in_features
        self._out_features = dict(zip(names, out_features.values(), strict=True))
        self._weight: torch.Tensor | None = torch.empty(
            num_rows, in_features.size, dtype=FP8_DTYPE if all(in_8_bits) else dtype, device=device
        )
        self._scales = torch.empty(num_rows, dtype=torch.float32, device=device) if all(in_8_bits) else None
        self._bias = torch.empty(num_rows, dtype=dtype, device=device) if bias else None
        self._packed: LinearWeights = None

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills. Must be called before `pack`."""
        assert self._weight is not None, f"{', '.join(self._out_features)}: packed already"
        parts = {}
        start = 0
        for name, span in self._out_features.items():
            rows = slice(start, start + span.size)
            parts[f"{name}.weight"] = CheckpointPart(self._weight[rows], (span, self._in_features))
            if self._scales is not None:
                parts[f"{name}.weight_scale"] = CheckpointPart(self._scales[rows], (span,), is_scale=True)
            if self._bias is not None:
                parts[f"{name}.bias"] = CheckpointPart(self._bias[rows], (span,))
            start += span.size
        return parts

    def pack(self, ops: KernelOps) -> None:
        """Packs the weights for the operations and frees the memory they were loaded to, unless it is shared."""
        assert self._weight is not None, "packed twice"
        bias = self._bias if self._in_features.start == 0 else None
        if self._scales is None:
            self._packed = ops.pack_linear(self._weight, bias)
        else:
            self._packed = ops.pack_quantized(self._weight, self._scales, bias, self._dtype)
        self._weight = self._scales = self._bias = None

    def __call__(self, ops: KernelOps, x: LinearInput) -> torch.Tensor:
        """Computes x [T, columns] -> [T, rows]."""
        return ops.linear(x, self._packed)
