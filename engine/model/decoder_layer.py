"""One layer of the decoder: attention or a gated delta rule, and a feed-forward network, with RMSNorms around each."""

from functools import partial
from typing import Protocol

import torch

from engine.model.attention import Attention
from engine.model.checkpoint_part import CheckpointPart, Fill, Recall, Span
from engine.model.config import ModelConfig
from engine.model.delta_net import DeltaNet
from engine.model.feed_forward import (
    FeedForward,
    GatedFeedForward,
    LayerPart,
    MixtureOfExperts,
    MixtureWithSharedExpert,
)
from engine.model.linear import Linear, LinearFactory
from engine.model.norm import Norm
from engine.model.sharding import Sharding
from engine.model.stacked_linear import StackedLinear
from engine.parallel.group import ParallelGroup
from kernels.interface import KernelOps, KVCache, LinearInput
from kernels.metadata import AdaptedTokens, AttentionMetadata


class Mixer(LayerPart, Protocol):
    """The part of a layer in which tokens of a request see those before them."""

    @property
    def has_kv_cache(self) -> bool:
        """Whether it keeps keys and values."""
        ...

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers, in the order in which they are loaded."""
        ...

    @property
    def state_size(self) -> int:
        """Numbers, fp32, that it keeps of one request besides keys and values."""
        ...

    def use_states(self, memory: torch.Tensor, /) -> None:
        """Keeps the states of requests in memory, [num_slots, state_size] fp32; slots may lie apart."""
        ...

    def __call__(
        self,
        x: LinearInput,
        positions: torch.Tensor,
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        adapted: AdaptedTokens | None,
        /,
    ) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden], of which ranks compute terms of a sum."""
        ...


class DecoderLayer:
    """Weights and computation of one layer, or of the shard of a rank."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        ops: KernelOps,
        group: ParallelGroup,
        sharding: Sharding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        traits = config.traits
        self._ops = ops
        self._group = group
        self._prefix = f"model.layers.{index}."
        self._eps = config.rms_norm_eps
        hidden = Span.whole(config.hidden_size)
        linear: LinearFactory = partial(Linear, quantized=config.quantized, dtype=dtype, device=device)

        def norm(name: str, span: Span = hidden, *, scale: float = 1.0, order: torch.Tensor | None = None) -> Norm:
            made = Norm(span, offset=traits.norm_offset, scale=scale, order=order, dtype=dtype, device=device)
            self._norms[name] = made
            return made

        self._norms: dict[str, Norm] = {}
        self.input_norm = norm("input_layernorm") if traits.pre_norms else None
        self.mlp_norm: Norm | None = None
        self._attention_output_norm: Norm | None = None
        self._mlp_output_norm: Norm | None = None
        if traits.post_norms:
            scale = traits.residual_scale / traits.stream_unit
            names = traits.post_norm_names
            self._attention_output_norm = norm(names.behind_attention, scale=scale)
            if traits.pre_norms:
                self.mlp_norm = norm(names.before_mlp)
            self._mlp_output_norm = norm(names.behind_mlp, scale=scale)
        else:
            self.mlp_norm = norm("post_attention_layernorm")
        heads = traits.delta_rules[index] if traits.delta_rules else None
        self.mixer: Mixer
        if heads is None:
            self.mixer = Attention(config, index, rotary, ops, group, sharding, linear, norm, device=device)
        else:
            self.mixer = DeltaNet(config, index, heads, ops, sharding, linear, device=device)
        mixture = traits.mixtures[index] if traits.mixtures else None
        self.feed_forward: FeedForward
        if mixture is None:
            self.feed_forward = GatedFeedForward(
                f"{self._prefix}mlp.",
                hidden,
                sharding.intermediate,
                linear,
                ops,
                config.gate,
                has_bias=traits.mlp_bias,
                is_fused=traits.fused_gate_up,
            )
        else:
            self.feed_forward = experts = MixtureOfExperts(
                self._prefix,
                hidden,
                sharding.of_experts(mixture),
                linear,
                ops,
                config.gate,
                mixture,
                quantized=config.quantized,
                dtype=dtype,
                device=device,
            )
            if (shared := sharding.of_shared_expert(mixture)) is not None:
                prefix = f"{self._prefix}{mixture.module}."
                self.feed_forward = MixtureWithSharedExpert(
                    prefix,
                    hidden,
                    shared,
                    experts,
                    linear,
                    ops,
                    config.gate,
                    quantized=config.quantized,
                    device=device,
                )

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills; linear layers are without memory."""
        parts = self._norm_parts() | self.mixer.own_parts() | self.feed_forward.own_parts()
        for linear in self.linears:
            parts |= linear.checkpoint_parts()
        return parts

    def load(self, fill: Fill, recall: Recall) -> None:
        """Fills norms, then of each half its own parts, and loads and packs one linear layer at a time."""
        fill(self._norm_parts())
        for norm in self._norms.values():
            norm.finish()
        halves: tuple[LayerPart, ...] = (self.mixer, self.feed_forward)
        for part in halves:
            fill(part.own_parts())
            for linear in part.linears:
                linear.load(self._ops, fill, recall)
            part.finish()

    @property
    def linears(self) -> tuple[Linear | StackedLinear, ...]:
        """All linear layers, in the order in which they are loaded."""
        return *self.mixer.linears, *self.feed_forward.linears

    @property
    def adaptable(self) -> tuple[Linear, ...]:
        """Linear layers that adapters can change."""
        return *self.mixer.linears, *self.feed_forward.adaptable

    def _norm_parts(self) -> dict[str, CheckpointPart]:
        return {f"{self._prefix}{name}.weight": norm.part for name, norm in self._norms.items()}

    def mix(
        self,
        x: LinearInput,
        positions: torch.Tensor,
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        adapted: AdaptedTokens | None,
    ) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden]; updates the KV cache, or the states of the requests."""
        terms = self.mixer(x, positions, kv_cache, metadata, adapted)
        return self._normed(self._group.all_reduce(terms), self._attention_output_norm)

    def mlp(self, x: LinearInput, adapted: AdaptedTokens | None) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden]."""
        return self._normed(self._group.all_reduce(self.feed_forward(x, adapted)), self._mlp_output_norm)

    def _normed(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return x if norm is None else self._ops.rms_norm(x, norm.weight, self._eps)
