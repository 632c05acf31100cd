"""The decoder that all architectures share: embedding, layers, norm and output head, on a ragged batch.

In pipeline stages, `Decoder` is the first, which begins and ends a step, and `DecoderStage` each other one.
"""

from collections.abc import Iterator, Sequence

import torch

from engine.model.checkpoint_part import CheckpointPart, Fill, Recall, Span, pack_anew
from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderLayer
from engine.model.layer_stack import LayerStack
from engine.model.linear_adapters import AdaptableModel, LinearAdapters
from engine.model.norm import Norm
from engine.model.sharding import Sharding
from engine.model.vocabulary import Vocabulary
from engine.parallel.group import SINGLE_RANK, ParallelGroup
from kernels.interface import KernelOps, KVCache
from kernels.metadata import AdaptedTokens, AttentionMetadata, StateCopy, StepInputs


class _Layers:
    """What each stage has, and a model that is not divided: consecutive layers, or this rank's shard of them."""

    mixes_torch = False
    resumes_states = True

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
        """As `Decoder`."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self._ops = ops
        self._group = group
        self._states = torch.empty(0)
        self._sharding = Sharding.of(config, group)
        self._stack = LayerStack(
            config, ops, group, self._sharding, max_positions=max_positions, dtype=dtype, device=device
        )

    @property
    def hidden_size(self) -> int:
        """Columns of the residual stream."""
        return self.config.hidden_size

    @property
    def residual_dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return torch.float32 if self.device.type == "cpu" else self.dtype

    def allocate_states(self, num_slots: int) -> None:
        """See `StepModel`. The state of a slot is contiguous: to copy it is one operation.

        On a CPU a slot takes memory when it is first written.
        """
        mixers = [layer.mixer for layer in self.layers]
        sizes = [mixer.state_size for mixer in mixers]
        for slots in (0, num_slots):  # first none, so that those before are free
            self._states = torch.zeros(slots, sum(sizes), device=self.device)
            for mixer, memory in zip(mixers, torch.split(self._states, sizes, dim=1), strict=True):
                mixer.use_states(memory)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """See `StepModel`."""
        for source, target in copies:
            self._states[target] = self._states[source]

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """The layers, in order."""
        return self._stack.layers


class Decoder(_Layers, AdaptableModel):
    """A decoder-only transformer; `engine.model.loader.load_model` creates one and fills its weights.

    It computes on tensors and does not know requests or prompts. In a group of ranks it holds this rank's shard of
    every matrix. All ranks run every step together, and all of this stage get the logits. In pipeline stages it has the
    first layers, embedding and output head: `step` returns the residual stream behind these layers, and `head` computes
    the logits of what comes back from the last stage.
    """

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
        assert group.stage == 0, f"stage {group.stage} has neither embedding nor output head"
        super().__init__(config, ops, max_positions=max_positions, dtype=dtype, device=device, group=group)
        self._is_divided = group.num_stages > 1
        self.vocabulary = Vocabulary(config, ops, group, self._sharding, dtype=dtype, device=device)
        traits = config.traits
        whole = Span.whole(config.hidden_size)
        self.norm = Norm(whole, offset=traits.norm_offset, scale=traits.logit_scale, dtype=dtype, device=device)

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills; linear layers are without memory.

        Together these are all weights, each once.
        """
        return self.vocabulary.checkpoint_parts() | self._norm_parts() | self._stack.checkpoint_parts()

    def load(self, fill: Fill, recall: Recall = pack_anew) -> None:
        """Loads the weights and packs them for the operations, one matrix at a time.

        So memory holds the packed weights and one matrix in the format of the checkpoint, never the whole checkpoint.
        The largest, embedding and output head, come first, while there is room for them twice.
        Packed weights that are recalled are not read.
        """
        self.vocabulary.load(fill, recall)
        fill(self._norm_parts())
        self.norm.finish()
        self._stack.load(fill, recall)

    def adaptable(self) -> Iterator[LinearAdapters]:
        """See `AdaptableModel`."""
        return (linear.adapters for linear in self._stack.adaptable)

    def _norm_parts(self) -> dict[str, CheckpointPart]:
        return {"model.norm.weight": self.norm.part}

    def step(self, inputs: StepInputs, kv_caches: Sequence[KVCache]) -> torch.Tensor:
        """Computes a ragged batch.

        Returns: logits [S, vocab_size] fp32 of the tokens in `logits_indices`, or of a model in stages the residual
            stream [T, hidden_size] for the second one.
        """
        hidden = self.forward(inputs.input_ids, inputs.positions, kv_caches, inputs.metadata, inputs.adapted)
        if self._is_divided:
            return hidden
        return self.compute_logits(self._ops.gather_rows(hidden, inputs.logits_indices), inputs.logits)

    @torch.inference_mode()
    def head(self, residual: torch.Tensor) -> torch.Tensor:
        """Computes logits [S, vocab_size] fp32 of rows [S, hidden_size] of the last stage's residual stream."""
        return self.compute_logits(self._ops.rms_norm(residual, self.norm.weight, self._stack.eps))

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
            positions, kv_caches, metadata, adapted: see `LayerStack.run`.
        Returns: [T, hidden_size], normalised, for `compute_logits`; of a model in stages not normalised.
        """
        last_norm = None if self._is_divided else self.norm
        residual = self.vocabulary.embed(input_ids)
        return self._stack.run(residual, positions, kv_caches, metadata, adapted, last_norm)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes logits [S, vocab_size] fp32 of rows [S, hidden_size] of the result of `forward`.

        Writes them to `out` if given.
        """
        logits = self.vocabulary.logits(hidden)
        logits = logits.float() if out is None else out.copy_(logits)
        soft_cap = self.config.traits.logit_soft_cap
        return logits if soft_cap is None else self._ops.soft_cap(logits, soft_cap)


class DecoderStage(_Layers):
    """The layers of a pipeline stage behind the first, or this rank's shard of them."""

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """As `Decoder.checkpoint_parts`."""
        return self._stack.checkpoint_parts()

    def load(self, fill: Fill, recall: Recall = pack_anew) -> None:
        """As `Decoder.load`."""
        self._stack.load(fill, recall)

    @torch.inference_mode()
    def step(self, inputs: StepInputs, kv_caches: Sequence[KVCache]) -> torch.Tensor:
        """Computes the layers on `inputs.residual`.

        Returns: the residual stream behind them: [T, hidden_size], or of the last stage [S, hidden_size], the rows of
            the tokens in `logits_indices`.
        """
        assert inputs.residual is not None
        residual = self._stack.run(
            inputs.residual, inputs.positions, kv_caches, inputs.metadata, inputs.adapted, last_norm=None
        )
        is_last = self._group.stage == self._group.num_stages - 1
        return self._ops.gather_rows(residual, inputs.logits_indices) if is_last else residual


def make_decoder(
    config: ModelConfig,
    ops: KernelOps,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    group: ParallelGroup,
) -> Decoder | DecoderStage:
    """Returns what a rank holds of a model. Raises as `Decoder`."""
    kind = Decoder if group.stage == 0 else DecoderStage
    return kind(config, ops, max_positions=max_positions, dtype=dtype, device=device, group=group)
