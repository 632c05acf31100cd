"""Attention of one layer: projections, rotation and the paged cache."""

from typing import Protocol

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_part import CheckpointPart, FusedSpan, Span
from engine.model.config import ModelConfig
from engine.model.linear import Linear, LinearFactory
from engine.model.norm import Norm, norm_columns_of_ranks
from engine.model.rope import RopeConfig
from engine.model.rotary_tables import rotated_pairs_order
from engine.model.sharding import Sharding
from engine.parallel.group import ParallelGroup
from kernels.interface import KernelOps, KVCache, LinearInput
from kernels.metadata import AdaptedTokens, AttentionMetadata


class NormFactory(Protocol):
    """Makes the RMSNorms of one layer, which the layer loads."""

    def __call__(self, name: str, span: Span, *, order: torch.Tensor | None = None) -> Norm:
        """Returns a norm of the values in `span`; `name` is that in the checkpoint, behind the prefix of the layer.

        order: see `Norm`.
        """
        ...


class Attention:
    """Weights and computation of the attention of one layer, or of the heads of a rank.

    Attributes:
        qkv: projections of queries, keys and values; behind those of the gate if there is one.
        o: projection of the result.
    """

    has_kv_cache = True

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        ops: KernelOps,
        group: ParallelGroup,
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
            group: ranks that share the heads.
            sharding: heads of the rank.
            linear, norm: make linear layers and norms.
            device: of the sinks.
        """
        traits = config.traits
        self._ops = ops
        self._group = group
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
        self._num_gates = q.size if traits.attention_gate else 0
        order = _order_in_head(traits.ropes[index], config.head_dim)
        self._head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if traits.qk_norm:
            names = ("self_attn.q_norm", "self_attn.k_norm")
            q_norm, k_norm = (norm(name, Span.whole(config.head_dim), order=order) for name in names)
            self._head_norms = q_norm.weight, k_norm.weight
        self._projection_norms: tuple[Norm, ...] = ()
        if traits.projection_norms:
            if order is not None:
                raise CheckpointError(
                    "config.json: norms of all queries and keys with partial_rotary_factor below 1 are not supported"
                )
            self._projection_norms = (norm("self_attn.q_norm", q), norm("self_attn.k_norm", kv))
        # fp32 holds what checkpoints have, and attention computes with it
        self._sinks = torch.empty(sharding.heads.size, device=device) if traits.has_sinks else None
        q_rows = sharding.heads.times(2 * config.head_dim) if self._num_gates else q
        qkv: dict[str, Span | FusedSpan] = {"q_proj": q_rows, "k_proj": kv, "v_proj": kv}
        if traits.fused_qkv:
            qkv = {"qkv_proj": FusedSpan((q, kv, kv))}
        row_order = self._order_of_qkv(sharding, order)
        self.qkv = linear(self._prefix, hidden, qkv, bias=traits.qkv_bias, row_order=row_order)
        self.o = linear(self._prefix, q, {"o_proj": hidden}, bias=traits.o_bias)

    def _order_of_qkv(self, sharding: Sharding, order: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the order of rows that the rotation requires, with all gates before queries, keys and values.

        A checkpoint has the gate of each head behind its query, in `q_proj`: its rows stay before those of `k_proj`.
        """
        if order is None and not self._num_gates:
            return None
        dim, num_heads, num_kv_heads = self._head_dim, sharding.heads.size, sharding.kv_heads.size
        in_head = torch.arange(dim)
        rotated = in_head if order is None else order
        query_rows = 2 * dim if self._num_gates else dim
        first_key = num_heads * query_rows
        queries = torch.arange(num_heads)[:, None] * query_rows
        keys = first_key + torch.arange(num_kv_heads)[:, None] * dim
        parts = [queries + rotated, keys + rotated, keys + num_kv_heads * dim + in_head]
        if self._num_gates:
            parts.insert(0, queries + dim + in_head)
        return torch.cat([part.flatten() for part in parts])

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Both linear layers, in the order in which they are loaded."""
        return self.qkv, self.o

    def own_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without norms and linear layers."""
        if self._sinks is None:
            return {}
        return {f"{self._prefix}sinks": CheckpointPart(self._sinks, (self._heads,))}

    def finish(self) -> None:
        """Does nothing: sinks and linear layers are used as they are."""

    @property
    def state_size(self) -> int:
        """None: keys and values are all that it keeps."""
        return 0

    def use_states(self, memory: torch.Tensor) -> None:
        """Does nothing."""

    def __call__(
        self,
        x: LinearInput,
        positions: torch.Tensor,
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        adapted: AdaptedTokens | None,
    ) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden], of which ranks compute terms of a sum.

        Writes keys and values of the step, then reads the cache.
        """
        assert kv_cache is not None, "attention has a cache"
        metadata = metadata.of_group(self._cache_group)
        projected = self.qkv(self._ops, x, adapted)
        qkv = projected[:, self._num_gates :] if self._num_gates else projected
        if self._projection_norms:
            self._norm_projections(qkv)
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
        if self._num_gates:
            out = self._ops.gate_columns(out, projected[:, : self._num_gates])
        return self.o(self._ops, out, adapted)

    def _norm_projections(self, qkv: torch.Tensor) -> None:
        """Norms the queries of all heads together, and the keys, in place."""
        weights = [norm.weight for norm in self._projection_norms]
        if self._group.size > 1:
            norm_columns_of_ranks(qkv, weights, self._eps, self._group)
            return
        first = 0
        for weight in weights:
            self._ops.norm_columns(qkv, first, weight, self._eps)
            first += len(weight)


def _order_in_head(rope: RopeConfig | None, head_dim: int) -> torch.Tensor | None:
    """Returns the order of a head's dimensions that a partial or interleaved rotation requires; None: their own."""
    return None if rope is None or rope.keeps_order(head_dim) else rotated_pairs_order(rope, head_dim)
