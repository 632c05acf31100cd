"""The decoder skeleton every architecture shares: embedding, layers, norm, output head, on a ragged batch."""

from collections.abc import Callable, Sequence

import torch

from engine.model.checkpoint_part import CheckpointPart, Span
from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderLayer, DecoderTraits
from engine.model.rope import rotary_tables
from engine.model.sharding import Sharding
from engine.parallel.group import SINGLE_RANK, ParallelGroup
from kernels.interface import KernelOps, KVCache, LinearWeights
from kernels.metadata import AttentionMetadata, StepInputs


class Decoder:
    """A decoder-only transformer with uninitialised weights; `engine.model.loader.load_model` makes one and fills it.

    It sees tensors only: what a request, a block or a prompt is, it does not know. In a group of ranks it holds this
    one's share of every matrix, and every step is one of the group: all ranks run it, and all get the logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        traits: DecoderTraits,
        ops: KernelOps,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        group: ParallelGroup = SINGLE_RANK,
    ) -> None:
        """Allocates the weights.

        Raises:
            ConfigError: the group cannot share the model; names the numbers.
            CheckpointError: of the projections in one matrix some are in 8 bits, some are not.
        """
        self.config = config
        self.dtype = dtype
        self.device = device
        self._ops = ops
        self._group = group
        sharding = Sharding.of(config, group.rank, group.size)
        self._vocabulary = sharding.vocabulary
        self._rotary = rotary_tables(config.rope, config.head_dim, max_positions, device)
        self.embed_tokens = self._vocabulary_matrix(sharding.vocabulary_rows)
        self._lm_head: torch.Tensor | None = self.embed_tokens
        if not config.tie_word_embeddings:
            self._lm_head = self._vocabulary_matrix(sharding.vocabulary_rows)
        self._packed_lm_head: LinearWeights = None
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(config, traits, index, ops, group, sharding, dtype=dtype, device=device)
            for index in range(config.num_layers)
        ]

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Name in the checkpoint -> the (part of a) parameter it fills; together they are all weights, none twice.

        Before `pack`.
        """
        parts = {
            "model.embed_tokens.weight": self._vocabulary_part(self.embed_tokens),
            "model.norm.weight": CheckpointPart.whole(self.norm),
        }
        if not self.config.tie_word_embeddings:
            assert self._lm_head is not None, "packed already"
            parts["lm_head.weight"] = self._vocabulary_part(self._lm_head)
        for layer in self.layers:
            parts |= layer.checkpoint_parts()
        return parts

    def pack(self, on_packed: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        """Makes the loaded weights ready for use, one matrix after the other: both forms exist of one at a time.

        Args:
            on_packed: told how many layers are done, of how many; 0 at the beginning.
        """
        for number, layer in enumerate(self.layers):
            on_packed(number, len(self.layers))
            layer.pack()
        assert self._lm_head is not None, "packed twice"
        self._packed_lm_head = self._ops.pack_linear(self._lm_head, None, for_logits=True)
        self._lm_head = None

    def step(self, inputs: StepInputs, kv_caches: Sequence[KVCache]) -> torch.Tensor:
        """One step of a ragged batch -> logits [S, vocab_size] fp32 of the tokens that `logits_indices` names."""
        hidden = self.forward(inputs.input_ids, inputs.positions, kv_caches, inputs.metadata)
        return self.compute_logits(self._ops.gather_rows(hidden, inputs.logits_indices))

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Runs the ragged batch through all layers; writes its keys and values to the caches.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, below the `max_positions` it was made for.
            kv_caches: one per layer, made by the operations it runs on.
            metadata: how the T tokens divide into rows.
        Returns: [T, hidden_size], normed, ready for `compute_logits`.
        """
        assert len(kv_caches) == len(self.layers), f"{len(kv_caches)} caches for {len(self.layers)} layers"
        residual = self._embed(input_ids)
        eps = self.config.rms_norm_eps
        x = self._ops.rms_norm(residual, self.layers[0].input_norm, eps, for_linear=True)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            x = layer.attention(x, positions, self._rotary, kv_cache, metadata)
            x, residual = self._ops.add_rms_norm(x, residual, layer.post_attention_norm, eps, for_linear=True)
            x = layer.mlp(x)
            for_linear = next_norm is not self.norm  # rows to compute logits of are gathered first
            x, residual = self._ops.add_rms_norm(x, residual, next_norm, eps, for_linear=for_linear)
        assert isinstance(x, torch.Tensor), "the last norm was not for a linear layer"
        return x

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [S, hidden_size] -> logits [S, vocab_size], fp32."""
        logits = self._group.all_gather_columns(self._ops.linear(hidden, self._packed_lm_head))
        if logits.shape[1] != self.config.vocab_size:  # rows that fill up the last ranks
            logits = logits[:, : self.config.vocab_size].contiguous()
        return logits.float()

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]: each rank knows the tokens of its rows, and adds zeros for others."""
        if self._group.size == 1:
            return self._ops.gather_rows(self.embed_tokens, input_ids)
        rows = input_ids - self._vocabulary.start
        is_here = (rows >= 0) & (rows < self._vocabulary.size)
        known = self._ops.gather_rows(self.embed_tokens, torch.where(is_here, rows, 0))
        return self._group.all_reduce(torch.where(is_here[:, None], known, 0.0))

    def _vocabulary_matrix(self, num_rows: int) -> torch.Tensor:
        """Room for this rank's rows; what is left of it is zeros."""
        matrix = torch.empty(num_rows, self.config.hidden_size, dtype=self.dtype, device=self.device)
        matrix[self._vocabulary.size :].zero_()
        return matrix

    def _vocabulary_part(self, matrix: torch.Tensor) -> CheckpointPart:
        columns = Span.whole(matrix.shape[1])
        return CheckpointPart(matrix[: self._vocabulary.size], (self._vocabulary, columns))
