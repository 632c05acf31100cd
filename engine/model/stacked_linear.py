"""Linear layers of experts that the checkpoint stores in one tensor for all experts of a layer, as gpt-oss does."""

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_part import CheckpointPart, Fill, Recall, Span, pack_anew
from engine.model.fp4_matrix import check_scale_groups
from engine.model.linear import Kept
from engine.model.mxfp4 import Mxfp4Weights
from engine.model.quantization_config import QuantizedWeights
from kernels.interface import KernelOps, LinearWeights
from kernels.microscaled_weights import NAN, MicroscaledWeights
from kernels.scale_groups import MXFP4_GROUP_SIZE

_META = torch.device("meta")


class StackedLinear:
    """One linear layer of each expert, and biases [experts, out]. With N experts its weights are one of these:

    | numbers | tensors |
    |---|---|
    | 16 or 32 bits | `down_proj` [N, in, out] |
    | MXFP4 | `down_proj_blocks` [N, out, in / 32, 16] and `down_proj_scales` [N, out, in / 32], uint8 |

    They are loaded together, which takes memory for one such tensor besides the packed weights.
    """

    def __init__(
        self,
        name: str,
        num_experts: int,
        in_features: Span,
        out_features: Span,
        *,
        alternates: bool,
        quantized: QuantizedWeights | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates nothing yet.

        Args:
            name: in the checkpoint, such as `model.layers.0.mlp.experts.down_proj`.
            num_experts: how many.
            in_features, out_features: columns and rows of each expert's matrix.
            alternates: whether rows of two projections alternate; in memory one comes below the other.
            quantized: how the checkpoint quantises layers, and which; None: none.
            dtype: of the inputs, and of weights that are not quantised.
            device: of the weights.

        Raises:
            CheckpointError: experts are stored in another format, or groups do not divide the inputs.
            ConfigError: ranks do not have whole groups.
        """
        self._name, self._dtype, self._device = name, dtype, device
        self._in_features, self._out_features = in_features, out_features
        self._experts = Span.whole(num_experts)
        self._alternates = alternates
        self._packed: list[LinearWeights] = []
        self.is_quantized = quantized is not None and quantized.holds(name)
        self._quantized = quantized if self.is_quantized else None
        if not self.is_quantized:
            return
        if not isinstance(quantized, Mxfp4Weights):
            raise CheckpointError(
                f"quantization_config: {name} is one tensor for all experts, which is supported in 16 bits, 32 bits "
                "and mxfp4"
            )
        check_scale_groups(name, in_features, MXFP4_GROUP_SIZE, "mxfp4")

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without memory."""
        return self._allocate(_META)

    def load(self, ops: KernelOps, fill: Fill, recall: Recall = pack_anew) -> None:
        """Allocates and fills the weights, and packs them expert by expert; or recalls all of them.

        Raises: CheckpointError: a scale is NaN.
        """
        self._packed = recall(self._name, lambda: self._load(ops, fill))

    def _load(self, ops: KernelOps, fill: Fill) -> list[LinearWeights]:
        parts = self._allocate(self._device)
        fill(parts)
        tensors = {name.removeprefix(self._name): part.tensor for name, part in parts.items()}
        if self.is_quantized and bool((tensors["_scales"] == NAN).any()):
            raise CheckpointError(f"tensor {self._name}_scales holds NaN")
        has_bias = self._in_features.start == 0  # of ranks that share the inputs, the first adds it
        packed = []
        for expert in range(self._experts.size):
            bias = self._in_order(tensors["_bias"][expert]) if has_bias else None
            if self.is_quantized:
                codes, exponents = (self._in_order(tensors[name][expert]) for name in ("_blocks", "_scales"))
                weights = MicroscaledWeights(codes.flatten(1), exponents)
                packed.append(ops.pack_microscaled(weights, bias, self._dtype))
            else:
                packed.append(ops.pack_linear(self._in_order(tensors[""][expert].t()), bias))
        return packed

    def take_packed(self) -> list[LinearWeights]:
        """Returns the packed weights of each expert after `load`, and forgets them."""
        packed, self._packed = self._packed, []
        return packed

    def packed_bytes(self, *, is_quantized_on_load: bool, kept: Kept = (), is_compact: bool = False) -> int:
        """Returns the bytes of the packed weights; see `Linear.packed_bytes`."""
        num_rows, num_in = self._experts.size * self._out_features.size, self._in_features.size
        num_bytes = num_rows * self._dtype.itemsize
        if isinstance(self._quantized, kept) and not is_quantized_on_load:
            return num_bytes + self._quantized.packed_bytes((self._name,), num_rows, num_in, is_compact=is_compact)
        if is_quantized_on_load:
            return num_bytes + num_rows * (num_in + 4)
        return num_bytes + num_rows * num_in * self._dtype.itemsize

    def _allocate(self, device: torch.device) -> dict[str, CheckpointPart]:
        def part(dtype: torch.dtype, *spans: Span) -> CheckpointPart:
            return CheckpointPart(torch.empty([span.size for span in spans], dtype=dtype, device=device), spans)

        bias = {f"{self._name}_bias": part(self._dtype, self._experts, self._out_features)}
        if not self.is_quantized:
            return {self._name: part(self._dtype, self._experts, self._in_features, self._out_features)} | bias
        groups = self._in_features.in_blocks(MXFP4_GROUP_SIZE)
        matrices = self._experts, self._out_features, groups
        return bias | {
            f"{self._name}_blocks": part(torch.uint8, *matrices, Span.whole(MXFP4_GROUP_SIZE // 2)),
            f"{self._name}_scales": part(torch.uint8, *matrices),
        }

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows of a matrix, or numbers of a bias, in their order in memory, contiguous."""
        return torch.cat((rows[::2], rows[1::2])) if self._alternates else rows.contiguous()
