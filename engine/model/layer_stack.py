"""The layers of a model, or those of one pipeline stage, and the residual stream through them."""

from collections.abc import Iterator, Sequence

import torch

from engine.model.checkpoint_part import CheckpointPart, Fill, Recall
from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderLayer
from engine.model.linear import Linear
from engine.model.norm import Norm
from engine.model.rotary_tables import rotary_tables
from engine.model.sharding import Sharding
from engine.parallel.group import ParallelGroup
from kernels.interface import KernelOps, KVCache, LinearInput
from kernels.metadata import AdaptedTokens, AttentionMetadata


class LayerStack:
    """Consecutive layers. Only the residual stream goes in and out.

    Attributes:
        layers: in order.
        eps: of the norms of the residual stream, in its units.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: KernelOps,
        group: ParallelGroup,
        sharding: Sharding,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates norms, uninitialised; `load` allocates the other weights."""
        self._ops = ops
        self.eps = config.rms_norm_eps / config.traits.stream_unit**2
        ropes = config.traits.ropes
        tables = {rope: rotary_tables(rope, config.head_dim, max_positions, device) for rope in dict.fromkeys(ropes)}
        self.layers = [
            DecoderLayer(config, index, tables[ropes[index]], ops, group, sharding, dtype=dtype, device=device)
            for index in sharding.layers
        ]
        self._ones = torch.ones(config.hidden_size, dtype=dtype, device=device)

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills; linear layers are without memory."""
        return {name: part for layer in self.layers for name, part in layer.checkpoint_parts().items()}

    def load(self, fill: Fill, recall: Recall) -> None:
        """Loads and packs one layer after the other."""
        for layer in self.layers:
            layer.load(fill, recall)

    @property
    def adaptable(self) -> Iterator[Linear]:
        """Linear layers that adapters can change."""
        return (linear for layer in self.layers for linear in layer.adaptable)

    def run(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
        adapted: AdaptedTokens | None,
        last_norm: Norm | None,
    ) -> torch.Tensor:
        """Computes the layers for a ragged batch, and writes its keys and values to the caches.

        Args:
            residual: [T, hidden_size], the residual stream; overwritten.
            positions: [T] int64, less than `max_positions`.
            kv_caches: one per layer that attends, allocated by the operations of the model.
            metadata: divides the T tokens into rows.
            adapted: tokens with an adapter; None: no adapters are computed.
            last_norm: behind the last layer of the model.
        Returns: [T, hidden_size], the residual stream, normalised if there is a last norm.
        """
        num_caches = sum(layer.mixer.has_kv_cache for layer in self.layers)
        assert len(kv_caches) == num_caches, f"{len(kv_caches)} caches for {num_caches} layers that attend"
        caches = iter(kv_caches)
        first_norm = self.layers[0].input_norm
        x = residual
        if first_norm is not None:
            x = self._ops.rms_norm(residual, first_norm.weight, self.eps, for_linear=True)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [last_norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            kv_cache = next(caches) if layer.mixer.has_kv_cache else None
            x = layer.mix(x, positions, kv_cache, metadata, adapted)
            for_linear = layer.feed_forward.is_linear_input
            x, residual = self._added(x, residual, layer.mlp_norm, for_linear=for_linear)
            x = layer.mlp(x, adapted)
            for_linear = layer is not self.layers[-1]  # the rows for the logits are gathered first
            x, residual = self._added(x, residual, next_norm, for_linear=for_linear)
        assert isinstance(x, torch.Tensor), "the last norm was not for a linear layer"
        return x

    def _added(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, *, for_linear: bool
    ) -> tuple[LinearInput, torch.Tensor]:
        """Adds x to the residual stream; returns it normed, or as it is without a norm, and as it is."""
        if norm is not None:
            return self._ops.add_rms_norm(x, residual, norm.weight, self.eps, for_linear=for_linear)
        _, residual = self._ops.add_rms_norm(x, residual, self._ones, self.eps)  # no operation adds alone
        return residual, residual
