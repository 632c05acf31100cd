"""One layer of the decoder: attention and a feed-forward network, with RMSNorms before or around each."""

from functools import partial

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_part import CheckpointPart, Fill, FusedSpan, Recall, Span
from engine.model.config import ModelConfig
from engine.model.feed_forward import FeedForward, GatedFeedForward, MixtureOfExperts
from engine.model.linear import Linear, LinearFactory
from engine.model.norm import Norm
from engine.model.rope import RopeConfig
from engine.model.rotary_tables import rotated_pairs_order
from engine.model.sharding import Sharding
from engine.model.stacked_linear import StackedLinear
from engine.parallel.group import ParallelGroup
from kernels.interface import KernelOps, KVCache, LinearInput
from kernels.metadata import AdaptedTokens, AttentionMetadata


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
        """Allocates norms and sinks, uninitialised; `load` allocates the other weights.

        Args:
            config: of the whole model.
            index: of the layer in it.
            rotary: result of `rotary_tables` for this layer.
            ops: operations of the model.
            group: the ranks that share the layer.
            sharding: what this rank has of it.
            dtype: of activations, and of weights that are not quantised.
            device: of the weights.

        Raises:
            CheckpointError: the layer cannot be loaded as the checkpoint stores it.
            ConfigError: it cannot be divided among the ranks.
        """
        traits = config.traits
        self._ops = ops
        self._group = group
        self._rotary = rotary
        self._prefix = f"model.layers.{index}."
        self._eps = config.rms_norm_eps
        self._attention_scale = traits.attention_scale or config.head_dim**-0.5
        self._attention_soft_cap = traits.attention_soft_cap
        self._head_dim = config.head_dim
        self._sliding_window = traits.sliding_windows[index]
        self._cache_group = config.group_of(index)
        hidden = Span.whole(config.hidden_size)
        q, kv = sharding.heads.times(config.head_dim), sharding.kv_heads.times(config.head_dim)
        self._norms: dict[str, Norm] = {}
        self._add_norms(config, q.size, kv.size, dtype, device)
        # fp32 holds what checkpoints have, and attention computes with it
        self._sinks = torch.empty(sharding.heads.size, device=device) if traits.has_sinks else None
        self._heads = sharding.heads
        qkv: dict[str, Span | FusedSpan] = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        if traits.fused_qkv:
            qkv = {"qkv_proj": FusedSpan((q, kv, kv))}
        row_order = self._order_of_qkv(sharding, traits.ropes[index])
        linear: LinearFactory = partial(Linear, quantized=config.quantized, dtype=dtype, device=device)
        attention = f"{self._prefix}self_attn."
        self.qkv = linear(attention, hidden, qkv, bias=traits.qkv_bias, row_order=row_order)
        self.o = linear(attention, q, {"o_proj": hidden}, bias=traits.o_bias)
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
            self.feed_forward = MixtureOfExperts(
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

    def _add_norms(
        self, config: ModelConfig, q_size: int, kv_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocates the norms that a model has: before attention and feed-forward network, behind them, and of heads.

        q_size, kv_size: of the queries and of the keys of a token, on this rank.
        """
        traits = config.traits

        def norm(name: str, size: int = config.hidden_size, scale: float = 1.0) -> Norm:
            made = Norm(size, offset=traits.norm_offset, scale=scale, dtype=dtype, device=device)
            self._norms[name] = made
            return made

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
        self._head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if traits.qk_norm:
            q_norm, k_norm = (norm(f"self_attn.{name}", config.head_dim) for name in ("q_norm", "k_norm"))
            self._head_norms = q_norm.weight, k_norm.weight
        self._projection_norms: tuple[Norm, ...] = ()
        if traits.projection_norms:
            sizes = {"q_norm": q_size, "k_norm": kv_size}
            self._projection_norms = tuple(norm(f"self_attn.{name}", size) for name, size in sizes.items())

    def _order_of_qkv(self, sharding: Sharding, rope: RopeConfig | None) -> torch.Tensor | None:
        """Returns the order of rows of queries, keys and values that a partial or interleaved rotation requires."""
        if rope is None or rope.keeps_order(self._head_dim):
            return None
        if self._head_norms is not None or self._projection_norms:
            raise CheckpointError(
                "config.json: norms of queries and keys with partial_rotary_factor below 1 are not supported"
            )
        order, kv_heads = rotated_pairs_order(rope, self._head_dim), sharding.kv_heads.size
        num_rotated = sharding.heads.size + kv_heads
        rotated = (torch.arange(num_rotated)[:, None] * self._head_dim + order).flatten()
        return torch.cat((rotated, torch.arange(kv_heads * self._head_dim) + num_rotated * self._head_dim))

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills; linear layers are without memory."""
        parts = self._own_parts() | self.feed_forward.own_parts()
        for linear in self.linears:
            parts |= linear.checkpoint_parts()
        return parts

    def load(self, fill: Fill, recall: Recall) -> None:
        """Fills norms and sinks, then loads and packs one linear layer at a time."""
        fill(self._own_parts())
        for norm in self._norms.values():
            norm.finish()
        for linear in (self.qkv, self.o):
            linear.load(self._ops, fill, recall)
        self.feed_forward.load(fill, recall)

    @property
    def linears(self) -> tuple[Linear | StackedLinear, ...]:
        """All linear layers, in the order in which they are loaded."""
        return self.qkv, self.o, *self.feed_forward.linears

    @property
    def adaptable(self) -> tuple[Linear, ...]:
        """Linear layers that adapters can change."""
        return self.qkv, self.o, *self.feed_forward.adaptable

    def _own_parts(self) -> dict[str, CheckpointPart]:
        parts = {
            f"{self._prefix}{name}.weight": CheckpointPart.whole(norm.weight) for name, norm in self._norms.items()
        }
        if self._sinks is not None:
            parts[f"{self._prefix}self_attn.sinks"] = CheckpointPart(self._sinks, (self._heads,))
        return parts

    def attention(
        self,
        x: LinearInput,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        adapted: AdaptedTokens | None,
    ) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden]; writes keys and values of the step, then reads the cache."""
        metadata = metadata.of_group(self._cache_group)
        qkv, first = self.qkv(self._ops, x, adapted), 0
        for norm in self._projection_norms:
            self._ops.norm_columns(qkv, first, norm.weight, self._eps)
            first += len(norm.weight)
        q = self._ops.rotate_and_store(
            qkv,
            positions,
            *self._rotary,
            kv_cache,
            metadata.slot_mapping,
            head_norms=self._head_norms,
            eps=self._eps,
        )
        out = self._ops.paged_attention(
            q,
            kv_cache,
            metadata,
            scale=self._attention_scale,
            sliding_window=self._sliding_window,
            soft_cap=self._attention_soft_cap,
            sinks=self._sinks,
        )
        return self._normed(self._group.all_reduce(self.o(self._ops, out, adapted)), self._attention_output_norm)

    def mlp(self, x: LinearInput, adapted: AdaptedTokens | None) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden]."""
        return self._normed(self._group.all_reduce(self.feed_forward(x, adapted)), self._mlp_output_norm)

    def _normed(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return x if norm is None else self._ops.rms_norm(x, norm.weight, self._eps)
