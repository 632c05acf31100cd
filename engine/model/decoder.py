"""The decoder skeleton every architecture shares: embedding, layers, norm, output head, on a ragged batch."""

from collections.abc import Sequence

import torch

from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderLayer, DecoderTraits
from engine.model.rope import rotary_tables
from kernels.metadata import AttentionMetadata, StepInputs
from kernels.ops import KernelOps, KVCache, LinearWeights


class Decoder:
    """A decoder-only transformer with uninitialised weights; `engine.model.loader.load_model` makes one and fills it.

    It sees tensors only: what a request, a block or a prompt is, it does not know.
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
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._ops = ops
        self._rotary = rotary_tables(config.rope, config.head_dim, max_positions, device)
        self.embed_tokens = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._lm_head: torch.Tensor | None = self.embed_tokens
        if not config.tie_word_embeddings:
            self._lm_head = torch.empty_like(self.embed_tokens)
        self._packed_lm_head: LinearWeights = None
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(config, traits, index, ops, dtype=dtype, device=device) for index in range(config.num_layers)
        ]

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Name in the checkpoint -> the (part of a) parameter it fills; together they are all weights, none twice.

        Before `pack`.
        """
        tensors = {"model.embed_tokens.weight": self.embed_tokens, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            assert self._lm_head is not None, "packed already"
            tensors["lm_head.weight"] = self._lm_head
        for layer in self.layers:
            tensors |= layer.checkpoint_tensors()
        return tensors

    def pack(self) -> None:
        """Makes the loaded weights ready for use, one matrix after the other: both forms exist of one at a time."""
        for layer in self.layers:
            layer.pack()
        assert self._lm_head is not None, "packed twice"
        self._packed_lm_head = self._ops.pack_linear(self._lm_head, None)
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
        residual = self._ops.gather_rows(self.embed_tokens, input_ids)
        x = self._ops.rms_norm(residual, self.layers[0].input_norm, self.config.rms_norm_eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            x = layer.attention(x, positions, self._rotary, kv_cache, metadata)
            x, residual = self._ops.add_rms_norm(x, residual, layer.post_attention_norm, self.config.rms_norm_eps)
            x = layer.mlp(x)
            x, residual = self._ops.add_rms_norm(x, residual, next_norm, self.config.rms_norm_eps)
        return x

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [S, hidden_size] -> logits [S, vocab_size], fp32."""
        return self._ops.linear(hidden, self._packed_lm_head).float()
