"""The gated delta rule in place of attention: a layer that keeps a state of fixed size instead of keys and values."""

import torch

from engine.model.checkpoint_part import CheckpointPart, Fill, Recall, Span
from engine.model.config import ModelConfig
from engine.model.linear import Linear, LinearFactory
from kernels.delta_heads import DeltaHeads
from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.interface import KernelOps, KVCache, LinearInput
from kernels.metadata import AdaptedTokens, AttentionMetadata


class DeltaNet:
    """Weights, states and computation of a Gated DeltaNet layer (arXiv:2412.06464).

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
        linear: LinearFactory,
        *,
        device: torch.device,
    ) -> None:
        """Allocates what is no linear layer, uninitialised.

        Args:
            config: the configuration of the model.
            index: of the layer.
            heads: its sizes.
            ops: operations of the model.
            linear: makes linear layers.
            device: of weights and states.
        """
        self._ops = ops
        self._heads = heads
        self._eps = config.rms_norm_eps
        self._device = device
        self._prefix = f"model.layers.{index}.linear_attn."
        hidden, value = Span.whole(config.hidden_size), Span.whole(heads.value_size)
        per_head = Span.whole(heads.num_value_heads)
        qkvz = {"in_proj_qkv": Span.whole(heads.num_channels), "in_proj_z": value}
        self.qkvz = linear(self._prefix, hidden, qkvz, bias=False)
        self.ba = linear(self._prefix, hidden, {"in_proj_b": per_head, "in_proj_a": per_head}, bias=False)
        self.o = linear(self._prefix, value, {"out_proj": hidden}, bias=False)
        # fp32 holds what checkpoints have, and kernels compute with it
        self._conv = torch.empty(heads.num_channels, 1, heads.conv_width, device=device)
        self._log_decay, self._dt_bias = (torch.empty(heads.num_value_heads, device=device) for _ in range(2))
        self._norm = torch.empty(heads.value_dim, device=device)
        self._weights: DeltaWeights | None = None
        self._states: DeltaStates | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers, in the order in which they are loaded."""
        return self.qkvz, self.ba, self.o

    def own_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without those of `linears`."""
        own = {
            "conv1d.weight": self._conv,
            "A_log": self._log_decay,
            "dt_bias": self._dt_bias,
            "norm.weight": self._norm,
        }
        return {f"{self._prefix}{name}": CheckpointPart.whole(tensor) for name, tensor in own.items()}

    def load(self, fill: Fill, recall: Recall) -> None:
        """Fills what is no linear layer, then loads and packs one linear layer at a time."""
        fill(self.own_parts())
        conv = self._conv[:, 0].T.contiguous()
        self._weights = DeltaWeights(self._heads, conv, self._log_decay.exp(), self._dt_bias, self._norm, self._eps)
        for linear in self.linears:
            linear.load(self._ops, fill, recall)

    def allocate_states(self, num_slots: int) -> None:
        """Allocates the states of `num_slots` requests."""
        self._states = DeltaStates.zeros(self._heads, num_slots, self._device)

    def __call__(
        self,
        x: LinearInput,
        _positions: torch.Tensor,
        _kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        adapted: AdaptedTokens | None,
    ) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden]; reads and updates the states of the rows."""
        assert self._weights is not None, "the weights are not loaded"
        assert self._states is not None, "no states are allocated"
        qkvz, gates = self.qkvz(self._ops, x, adapted), self.ba(self._ops, x, adapted)
        return self.o(self._ops, self._ops.delta_rule(qkvz, gates, self._weights, self._states, metadata), adapted)
