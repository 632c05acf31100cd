"""Attention of one layer: projections, rotation and the paged cache."""

from typing import Protocol

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_part import CheckpointPart, FusedSpan, Span
from engine.model.config import ModelConfig
from engine.model.linear import Linear, LinearFactory
from engine.model.norm import Norm
from engine.model.rope import RopeConfig
from engine.model.rotary_tables import rotated_pairs_order
from engine.model.sharding import Sharding
from kernels.interface import KernelOps, KVCache, LinearInput
from kernels.metadata import AdaptedTokens, AttentionMetadata


class NormFactory(Protocol):
    """Makes the RMSNorms of one layer, which the layer loads."""

    def __call__(self, name: str, size: int) -> Norm:
        """Returns a norm of `size` values; `name` is its name in the checkpoint, behind the prefix of the layer."""
        ...


class Attention:
    """Weights and computation of the attention of one layer, or of the heads of a rank.

    Attributes:
        qkv: projections of queries, keys and values.
        o: projection of the result.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        ops: KernelOps,
        sharding: Sharding,
        linear: LinearFactory,
        norm: NormFactory,
        *,
        device: torch.device,
    ) -> None:
        """Allocates sinks, uninitialised.

        Args:
            config: the configuration of the model.
            index: of the layer.
            rotary: cos and sin of its rotation.
            ops: operations of the model.
            sharding: heads of the rank.
            linear, norm: make linear layers and norms.
            device: of the sinks.
        """
        traits = config.traits
        self._ops = ops
        self._rotary = rotary
        self._eps = config.rms_norm_eps
        self._scale = traits.attention_scale or config.head_dim**-0.5
        self._soft_cap = traits.attention_soft_cap
        self._head_dim = config.head_dim
        self._sliding_window = traits.sliding_windows[index]
        self._cache_group = config.group_of(index)
        self._heads = sharding.heads
        self._prefix = f"model.layers.{index}.self_attn."
        hidden = Span.whole(config.hidden_size)
        q, kv = sharding.heads.times(config.head_dim), sharding.kv_heads.times(config.head_dim)
        self._head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if traits.qk_norm:
            q_norm, k_norm = (norm(f"self_attn.{name}", config.head_dim) for name in ("q_norm", "k_norm"))
            self._head_norms = q_norm.weight, k_norm.weight
        self._projection_norms: tuple[Norm, ...] = ()
        if traits.projection_norms:
            sizes = {"q_norm": q.size, "k_norm": kv.size}
            self._projection_norms = tuple(norm(f"self_attn.{name}", size) for name, size in sizes.items())
        # fp32 holds what checkpoints have, and attention computes with it
        self._sinks = torch.empty(sharding.heads.size, device=device) if traits.has_sinks else None
        qkv: dict[str, Span | FusedSpan] = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        if traits.fused_qkv:
            qkv = {"qkv_proj": FusedSpan((q, kv, kv))}
        row_order = self._order_of_qkv(sharding, traits.ropes[index])
        self.qkv = linear(self._prefix, hidden, qkv, bias=traits.qkv_bias, row_order=row_order)
        self.o = linear(self._prefix, q, {"o_proj": hidden}, bias=traits.o_bias)

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

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Both linear layers, in the order in which they are loaded."""
        return self.qkv, self.o

    def own_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without norms and linear layers."""
        if self._sinks is None:
            return {}
        return {f"{self._prefix}sinks": CheckpointPart(self._sinks, (self._heads,))}

    def __call__(
        self,
        x: LinearInput,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        adapted: AdaptedTokens | None,
    ) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden], of which ranks compute terms of a sum.

        Writes keys and values of the step, then reads the cache.
        """
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
            scale=self._scale,
            sliding_window=self._sliding_window,
            soft_cap=self._soft_cap,
            sinks=self._sinks,
        )
        return self.o(self._ops, out, adapted)
