"""Linear layers of experts that the checkpoint stores in one tensor for all experts of a layer, as gpt-oss does."""

import torch

from engine.model.checkpoint_part import CheckpointPart, Fill, Span
from engine.model.linear import Kept
from kernels.interface import KernelOps, LinearWeights

_META = torch.device("meta")


class StackedLinear:
    """One linear layer of each expert: tensors [experts, in, out], and biases [experts, out].

    They are loaded together, which takes memory for one such tensor besides the packed weights.
    """

    is_quantized = False

    def __init__(
        self,
        name: str,
        num_experts: int,
        in_features: Span,
        out_features: Span,
        *,
        alternates: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates nothing yet.

        Args:
            name: of the tensor in the checkpoint, such as `model.layers.0.mlp.experts.down_proj`.
            num_experts: how many.
            in_features, out_features: columns and rows of each expert's matrix.
            alternates: whether rows of two projections alternate; in memory one comes below the other.
            dtype, device: of the weights.
        """
        self._name, self._dtype, self._device = name, dtype, device
        self._in_features, self._out_features = in_features, out_features
        self._experts = Span.whole(num_experts)
        self._alternates = alternates
        self._packed: list[LinearWeights] = []

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without memory."""
        return self._allocate(_META)

    def load(self, ops: KernelOps, fill: Fill) -> None:
        """Allocates and fills the weights, and packs them expert by expert."""
        parts = self._allocate(self._device)
        fill(parts)
        weights, biases = (parts[name].tensor for name in (self._name, self._bias_name))
        for weight, bias in zip(weights, biases, strict=True):
            has_bias = self._in_features.start == 0  # of ranks that share the columns, the first adds it
            self._packed.append(ops.pack_linear(self._in_order(weight.t()), self._in_order(bias) if has_bias else None))

    def take_packed(self) -> list[LinearWeights]:
        """Returns the packed weights of each expert after `load`, and forgets them."""
        packed, self._packed = self._packed, []
        return packed

    def packed_bytes(self, *, is_quantized_on_load: bool, kept: Kept = ()) -> int:  # noqa: ARG002 - as of `Linear`
        """Returns the bytes of the packed weights; see `Linear.packed_bytes`."""
        num_rows = self._experts.size * self._out_features.size
        num_bytes = num_rows * self._dtype.itemsize
        if is_quantized_on_load:
            return num_bytes + num_rows * (self._in_features.size + 4)
        return num_bytes + num_rows * self._in_features.size * self._dtype.itemsize

    @property
    def _bias_name(self) -> str:
        return f"{self._name}_bias"

    def _allocate(self, device: torch.device) -> dict[str, CheckpointPart]:
        def part(*spans: Span) -> CheckpointPart:
            return CheckpointPart(torch.empty([span.size for span in spans], dtype=self._dtype, device=device), spans)

        return {
            self._name: part(self._experts, self._in_features, self._out_features),
            self._bias_name: part(self._experts, self._out_features),
        }

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows of a matrix, or numbers of a bias, in their order in memory, contiguous."""
        return torch.cat((rows[::2], rows[1::2])) if self._alternates else rows.contiguous()
