"""The gated delta rule in place of attention: a layer that keeps a state of fixed size instead of keys and values."""

import torch

from engine.model.checkpoint_part import CheckpointPart, FusedSpan, Rows, Span
from engine.model.config import ModelConfig
from engine.model.linear import Linear, LinearFactory
from engine.model.sharding import Sharding
from kernels.delta_heads import DeltaHeads
from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.interface import KernelOps, KVCache, LinearInput
from kernels.metadata import AdaptedTokens, AttentionMetadata


class DeltaNet:
    """Weights and computation of a Gated DeltaNet layer (arXiv:2412.06464), or of the heads of a rank.

    Attributes:
        qkvz: projections of queries, keys, values and their gate.
        ba: projections of the strength and of the decay of each head, which checkpoints leave unquantised.
        o: projection of the result.
    """

    has_kv_cache = False

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        heads: DeltaHeads,
        ops: KernelOps,
        sharding: Sharding,
        linear: LinearFactory,
        *,
        device: torch.device,
    ) -> None:
        """Allocates what is no linear layer, uninitialised.

        Args:
            config: the configuration of the model.
            index: of the layer.
            heads: its sizes, in all ranks.
            ops: operations of the model.
            sharding: heads of the rank.
            linear: makes linear layers.
            device: of the weights.
        """
        self._ops = ops
        self._heads = own = sharding.own_delta_heads(heads)
        self._eps = config.rms_norm_eps
        self._prefix = f"model.layers.{index}.linear_attn."
        hidden = Span.whole(config.hidden_size)
        key_heads, self._value_heads = sharding.of_delta_heads(heads)
        key, value = key_heads.times(heads.key_dim), self._value_heads.times(heads.value_dim)
        self._channels = FusedSpan((key, key, value))
        traits, shared = config.traits, heads.num_value_heads // heads.num_key_heads
        qkvz: Rows = {"in_proj_qkv": self._channels, "in_proj_z": value}
        ba: Rows = {"in_proj_b": self._value_heads, "in_proj_a": self._value_heads}
        qkvz_order = ba_order = None
        if traits.fused_qkvz:
            values = shared * heads.value_dim
            qkvz, qkvz_order = _fused("in_proj_qkvz", key_heads, (heads.key_dim, heads.key_dim, values, values))
        if traits.fused_ba:
            ba, ba_order = _fused("in_proj_ba", key_heads, (shared, shared))
        self.qkvz = linear(self._prefix, hidden, qkvz, bias=False, row_order=qkvz_order)
        self.ba = linear(self._prefix, hidden, ba, bias=False, row_order=ba_order)
        self.o = linear(self._prefix, value, {"out_proj": hidden}, bias=False)
        # fp32 holds what checkpoints have, and kernels compute with it
        self._conv = torch.empty(own.num_channels, 1, own.conv_width, device=device)
        self._log_decay, self._dt_bias = (torch.empty(own.num_value_heads, device=device) for _ in range(2))
        self._norm = torch.empty(heads.value_dim, device=device)
        self._weights: DeltaWeights | None = None
        self._states: DeltaStates | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers, in the order in which they are loaded."""
        return self.qkvz, self.ba, self.o

    def own_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without those of `linears`."""
        conv = self._channels, Span.whole(1), Span.whole(self._heads.conv_width)
        return {
            f"{self._prefix}conv1d.weight": CheckpointPart(self._conv, conv),
            f"{self._prefix}A_log": CheckpointPart(self._log_decay, (self._value_heads,)),
            f"{self._prefix}dt_bias": CheckpointPart(self._dt_bias, (self._value_heads,)),
            f"{self._prefix}norm.weight": CheckpointPart.whole(self._norm),
        }

    def finish(self) -> None:
        """Makes the weights of the rule."""
        conv = self._conv[:, 0].T.contiguous()
        self._weights = DeltaWeights(self._heads, conv, self._log_decay.exp(), self._dt_bias, self._norm, self._eps)

    @property
    def state_size(self) -> int:
        """Numbers in the state of one request."""
        return self._heads.state_size

    def use_states(self, memory: torch.Tensor) -> None:
        """Keeps the states of requests in memory, [num_slots, state_size] fp32; slots may lie apart."""
        self._states = DeltaStates.of(memory, self._heads)

    def __call__(
        self,
        x: LinearInput,
        _positions: torch.Tensor,
        _kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        adapted: AdaptedTokens | None,
    ) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden], of which ranks compute terms of a sum.

        Reads and updates the states of the rows.
        """
        assert self._weights is not None, "the weights are not loaded"
        assert self._states is not None, "no memory for states is set"
        qkvz, gates = self.qkvz(self._ops, x, adapted), self.ba(self._ops, x, adapted)
        return self.o(self._ops, self._ops.delta_rule(qkvz, gates, self._weights, self._states, metadata), adapted)


def _fused(name: str, key_heads: Span, sizes: tuple[int, ...]) -> tuple[Rows, torch.Tensor]:
    """Returns rows of projections of which the checkpoint has those of one key head after the other.

    sizes: rows of each projection for a key head.
    Returns: the rows by their name, and their order in memory [rows] int64: one projection after the other.
    """
    rows = key_heads.times(sum(sizes))
    by_projection = torch.split(torch.arange(rows.size).view(key_heads.size, -1), list(sizes), dim=1)
    return {name: rows}, torch.cat([of_heads.flatten() for of_heads in by_projection])
