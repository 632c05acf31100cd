"""The decoder that all architectures share: embedding, layers, norm and output head, on a ragged batch."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from engine.model.checkpoint_part import CheckpointPart, Fill, Recall, pack_anew
from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderLayer
from engine.model.linear import ChangeOf, Linear
from engine.model.norm import Norm
from engine.model.rotary_tables import rotary_tables
from engine.model.sharding import Sharding
from engine.model.vocabulary import Vocabulary
from engine.parallel.group import SINGLE_RANK, ParallelGroup
from kernels.interface import AdapterOps, KernelOps, KVCache, LinearInput, LowRank, ReplaceableAdapterOps
from kernels.metadata import AdaptedTokens, AttentionMetadata, StepInputs


class Decoder:
    """A decoder-only transformer; `engine.model.loader.load_model` creates one and fills its weights.

    It computes on tensors and does not know requests or prompts. In a group of ranks it holds this rank's shard of
    every matrix. All ranks run every step together, and all get the logits.
    """

    mixes_torch = False

    def __init__(
        self,
        config: ModelConfig,
        ops: KernelOps,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        group: ParallelGroup = SINGLE_RANK,
    ) -> None:
        """Allocates norms, uninitialised; `load` allocates the other weights.

        Raises:
            ConfigError: the model cannot be divided among the ranks.
            CheckpointError: only some of the projections that form one matrix are in 8 bits.
        """
        self.config = config
        self.dtype = dtype
        self.device = device
        self._ops = ops
        sharding = Sharding.of(config, group.rank, group.size)
        ropes = config.traits.ropes
        tables = {rope: rotary_tables(rope, config.head_dim, max_positions, device) for rope in dict.fromkeys(ropes)}
        self.vocabulary = Vocabulary(config, ops, group, sharding, dtype=dtype, device=device)
        traits = config.traits
        self._eps = config.rms_norm_eps / traits.stream_unit**2
        self.norm = Norm(
            config.hidden_size, offset=traits.norm_offset, scale=traits.logit_scale, dtype=dtype, device=device
        )
        self.layers = [
            DecoderLayer(config, index, tables[ropes[index]], ops, group, sharding, dtype=dtype, device=device)
            for index in range(config.num_layers)
        ]

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills; linear layers are without memory.

        Together these are all weights, each once.
        """
        parts = self.vocabulary.checkpoint_parts() | self._norm_parts()
        for layer in self.layers:
            parts |= layer.checkpoint_parts()
        return parts

    def load(self, fill: Fill, recall: Recall = pack_anew) -> None:
        """Loads the weights and packs them for the operations, one matrix at a time.

        So memory holds the packed weights and one matrix in the format of the checkpoint, never the whole checkpoint.
        The largest, embedding and output head, come first, while there is room for them twice.
        Packed weights that are recalled are not read.
        """
        self.vocabulary.load(fill, recall)
        fill(self._norm_parts())
        self.norm.finish()
        for layer in self.layers:
            layer.load(fill, recall)

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns rows and columns of all linear layers that adapters can change, by their names in the checkpoint."""
        return {name: shape for linear in self._adaptable() for name, shape in linear.projection_shapes().items()}

    def set_adapters(self, ops: AdapterOps, adapters: Sequence[Mapping[str, LowRank]]) -> None:
        """Adds adapters, which steps then select by their index; each maps names of linear layers to changes."""
        for linear in self._adaptable():
            linear.set_adapters(ops, [changes.get for changes in adapters])

    def reserve_adapters(self, ops: ReplaceableAdapterOps, num_adapters: int, max_rank: int) -> None:
        """Allocates adapters of at most a rank, which change nothing until `set_adapter`."""
        for linear in self._adaptable():
            linear.reserve_adapters(ops, num_adapters, max_rank)

    def set_adapter(self, ops: ReplaceableAdapterOps, index: int, change_of: ChangeOf) -> None:
        """Replaces one of the reserved adapters, a layer at a time.

        It may be called on any thread, while steps run that do not use this adapter.
        """
        for linear in self._adaptable():
            linear.set_adapter(ops, index, change_of)

    def _adaptable(self) -> Iterator[Linear]:
        return (linear for layer in self.layers for linear in layer.adaptable)

    def _norm_parts(self) -> dict[str, CheckpointPart]:
        return {"model.norm.weight": CheckpointPart.whole(self.norm.weight)}

    def step(self, inputs: StepInputs, kv_caches: Sequence[KVCache]) -> torch.Tensor:
        """Computes a ragged batch; returns logits [S, vocab_size] fp32 of the tokens in `logits_indices`."""
        hidden = self.forward(inputs.input_ids, inputs.positions, kv_caches, inputs.metadata, inputs.adapted)
        return self.compute_logits(self._ops.gather_rows(hidden, inputs.logits_indices), inputs.logits)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
        adapted: AdaptedTokens | None = None,
    ) -> torch.Tensor:
        """Computes all layers for a ragged batch, and writes its keys and values to the caches.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, less than `max_positions`.
            kv_caches: one per layer, allocated by the operations of the model.
            metadata: divides the T tokens into rows.
            adapted: tokens with an adapter; None: no adapters are computed.
        Returns: [T, hidden_size], normalised, for `compute_logits`.
        """
        assert len(kv_caches) == len(self.layers), f"{len(kv_caches)} caches for {len(self.layers)} layers"
        residual = self.vocabulary.embed(input_ids)
        eps = self._eps
        first_norm = self.layers[0].input_norm
        x = residual if first_norm is None else self._ops.rms_norm(residual, first_norm.weight, eps, for_linear=True)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            x = layer.attention(x, positions, kv_cache, metadata, adapted)
            for_linear = layer.feed_forward.is_linear_input
            x, residual = self._added(x, residual, layer.mlp_norm, for_linear=for_linear)
            x = layer.mlp(x, adapted)
            for_linear = next_norm is not self.norm  # the rows for the logits are gathered first
            x, residual = self._added(x, residual, next_norm, for_linear=for_linear)
        assert isinstance(x, torch.Tensor), "the last norm was not for a linear layer"
        return x

    def _added(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, *, for_linear: bool
    ) -> tuple[LinearInput, torch.Tensor]:
        """Adds x to the residual stream; returns it normed, or as it is without a norm, and as it is."""
        if norm is not None:
            return self._ops.add_rms_norm(x, residual, norm.weight, self._eps, for_linear=for_linear)
        _, residual = self._ops.add_rms_norm(x, residual, self.norm.weight, self._eps)  # no operation adds alone
        return residual, residual

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes logits [S, vocab_size] fp32 of rows [S, hidden_size] of the result of `forward`.

        Writes them to `out` if given.
        """
        logits = self.vocabulary.logits(hidden)
        logits = logits.float() if out is None else out.copy_(logits)
        soft_cap = self.config.traits.logit_soft_cap
        return logits if soft_cap is None else self._ops.soft_cap(logits, soft_cap)
