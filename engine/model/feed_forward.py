"""Feed-forward networks of layers: a gated one that all tokens share, a mixture of experts, or both."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_part import CheckpointPart, FusedSpan, Span
from engine.model.family import Mixture
from engine.model.int_matrix import IntMatrix
from engine.model.int_weights import IntWeights
from engine.model.linear import Linear, LinearFactory
from engine.model.quantization_config import QuantizedWeights
from engine.model.stacked_linear import StackedLinear
from kernels.gates import Gate
from kernels.interface import Experts, KernelOps, LinearInput, Routing
from kernels.metadata import AdaptedTokens


class LayerPart(Protocol):
    """Half of a layer, or of the shard of a rank, as it is loaded."""

    @property
    def linears(self) -> tuple[Linear | StackedLinear, ...]:
        """All linear layers, in the order in which they are loaded."""
        ...

    def own_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without norms and `linears`."""
        ...

    def finish(self) -> None:
        """Makes what it computes with, once its own parts are filled and `linears` loaded."""
        ...


class FeedForward(LayerPart, Protocol):
    """Weights and computation of the feed-forward network of a layer."""

    @property
    def adaptable(self) -> tuple[Linear, ...]:
        """Linear layers that adapters can change."""
        ...

    @property
    def is_linear_input(self) -> bool:
        """Whether its inputs go to linear layers only, which may take them quantised."""
        ...

    def __call__(self, x: LinearInput, adapted: AdaptedTokens | None, /) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden], of which ranks compute terms of a sum."""
        ...


class GatedFeedForward:
    """down(gate(gate_up x)) (arXiv:2002.05202)."""

    def __init__(
        self, prefix: str, hidden: Span, inner: Span, linear: LinearFactory, ops: KernelOps, gate: Gate,
        *, has_bias: bool, is_fused: bool,
    ) -> None:  # fmt: skip
        """Allocates nothing yet.

        Args:
            prefix: prefix of the names in the checkpoint.
            hidden, inner: sizes of input and output, and between the layers.
            linear: makes linear layers.
            ops: operations of the model.
            gate: the operation between the layers.
            has_bias: whether the layers have biases.
            is_fused: whether the checkpoint stores gate and up as `gate_up_proj`.
        """
        gate_up: dict[str, Span | FusedSpan] = {"gate_proj": inner, "up_proj": inner}
        if is_fused:
            gate_up = {"gate_up_proj": FusedSpan((inner, inner))}
        self._ops = ops
        self._gate = gate
        self.gate_up = linear(prefix, hidden, gate_up, bias=has_bias)
        self.down = linear(prefix, inner, {"down_proj": hidden}, bias=has_bias)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Both linear layers."""
        return self.gate_up, self.down

    @property
    def adaptable(self) -> tuple[Linear, ...]:
        """Both linear layers."""
        return self.linears

    @property
    def is_linear_input(self) -> bool:
        """They do."""
        return True

    def own_parts(self) -> dict[str, CheckpointPart]:
        """Returns nothing: all weights are of linear layers."""
        return {}

    def finish(self) -> None:
        """Does nothing: the layers are used as they are."""

    def __call__(self, x: LinearInput, adapted: AdaptedTokens | None, /) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        gated = self._ops.gate_and_mul(self.gate_up(self._ops, x, adapted), self._gate)
        return self.down(self._ops, gated, adapted)


class MixtureOfExperts:
    """The sum of a few gated networks that a router chooses for each token (arXiv:2101.03961, section 2)."""

    def __init__(
        self,
        prefix: str,
        hidden: Span,
        inner: Span,
        linear: LinearFactory,
        ops: KernelOps,
        gate: Gate,
        mixture: Mixture,
        *,
        quantized: QuantizedWeights | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates the router, uninitialised; of each expert a rank holds a part.

        Args:
            prefix: prefix of the layer's names in the checkpoint.
            hidden, inner: sizes of input and output, and between the layers of an expert.
            linear: makes linear layers.
            ops: operations of the model.
            gate: the operation between the layers of an expert.
            mixture: number and choice of experts, and their names.
            quantized: how the checkpoint quantises layers, and which; None: none.
            dtype, device: of the router, which MLX alone quantises.

        Raises:
            CheckpointError: only some experts are quantised, or see `StackedLinear`.
            ConfigError: see `StackedLinear`.
        """
        self._ops = ops
        self._routing = Routing(mixture.top_k, mixture.normalizes, mixture.clamped_gate or gate)
        self._router_name = f"{prefix}{mixture.module}.{mixture.router}"
        router = torch.empty(mixture.num_experts, hidden.total, dtype=dtype, device=device)
        self._router = _OwnMatrix(self._router_name, router, quantized)
        self._router_bias = torch.empty(mixture.num_experts, dtype=dtype, device=device) if mixture.has_bias else None
        self._gate_up: Sequence[Linear | StackedLinear]
        self._down: Sequence[Linear | StackedLinear]
        if mixture.is_stacked:
            stacked = partial(
                StackedLinear, num_experts=mixture.num_experts, quantized=quantized, dtype=dtype, device=device
            )
            experts = f"{prefix}{mixture.module}.experts."
            both = inner.times(2)
            self._gate_up = [stacked(f"{experts}gate_up_proj", in_features=hidden, out_features=both, alternates=True)]
            self._down = [stacked(f"{experts}down_proj", in_features=inner, out_features=hidden, alternates=False)]
        else:
            gate_name, up_name, down_name = mixture.projections
            prefixes = [f"{prefix}{mixture.module}.experts.{expert}." for expert in range(mixture.num_experts)]
            self._gate_up = [
                linear(expert, hidden, {gate_name: inner, up_name: inner}, bias=mixture.has_bias) for expert in prefixes
            ]
            self._down = [linear(expert, inner, {down_name: hidden}, bias=mixture.has_bias) for expert in prefixes]
        for layers in (self._gate_up, self._down):
            if len({layer.is_quantized for layer in layers}) > 1:
                raise CheckpointError(
                    f"quantization_config: all experts of {prefix}{mixture.module} must be quantised, or none"
                )
        self._experts: Experts = None

    @property
    def linears(self) -> tuple[Linear | StackedLinear, ...]:
        """The layers of all experts, one expert after the other."""
        return tuple(layer for layers in zip(self._gate_up, self._down, strict=True) for layer in layers)

    @property
    def adaptable(self) -> tuple[Linear, ...]:
        """None: each expert sees its own tokens."""
        return ()

    @property
    def is_linear_input(self) -> bool:
        """They go to the router too, which chooses by exact inputs."""
        return False

    def own_parts(self) -> dict[str, CheckpointPart]:
        """Returns the parts of the router."""
        parts = self._router.parts()
        if self._router_bias is not None:
            parts[f"{self._router_name}.bias"] = CheckpointPart.whole(self._router_bias)
        return parts

    def finish(self) -> None:
        """Packs the router and the layers of all experts."""
        self._router.finish()
        gate_up, down = (
            [packed for layer in layers for packed in layer.take_packed()] for layers in (self._gate_up, self._down)
        )
        self._experts = self._ops.pack_experts(self._router.numbers, gate_up, down, self._routing, self._router_bias)

    def __call__(self, x: LinearInput, _adapted: AdaptedTokens | None, /) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        assert isinstance(x, torch.Tensor), "the norm was for a linear layer"
        return self._ops.mix_experts(x, self._experts)


class MixtureWithSharedExpert:
    """mixture(x) + sigmoid(gate . x) * shared(x) (Qwen2-MoE, arXiv:2407.10671, section 2.2.2)."""

    def __init__(
        self,
        prefix: str,
        hidden: Span,
        shared: Span,
        mixture: MixtureOfExperts,
        linear: LinearFactory,
        ops: KernelOps,
        gate: Gate,
        *,
        quantized: QuantizedWeights | None,
        device: torch.device,
    ) -> None:
        """Allocates the gate of the shared expert, uninitialised.

        Args:
            prefix: prefix of the names of mixture and shared expert in the checkpoint, such as `model.layers.0.mlp.`.
            hidden, shared: sizes of input and output, and between the layers of the shared expert.
            mixture: the other experts.
            linear: makes linear layers.
            ops: operations of the model.
            gate: the operation between the layers of the shared expert.
            quantized: how the checkpoint quantises layers, and which; None: none.
            device: of its gate: fp32 holds it, and kernels compute with it.
        """
        self._ops = ops
        self._mixture = mixture
        self._shared = GatedFeedForward(
            f"{prefix}shared_expert.", hidden, shared, linear, ops, gate, has_bias=False, is_fused=False
        )
        numbers = torch.empty(1, hidden.total, device=device)
        self._gate = _OwnMatrix(f"{prefix}shared_expert_gate", numbers, quantized)

    @property
    def linears(self) -> tuple[Linear | StackedLinear, ...]:
        """The layers of the mixture, then those of the shared expert."""
        return *self._mixture.linears, *self._shared.linears

    @property
    def adaptable(self) -> tuple[Linear, ...]:
        """The layers of the shared expert."""
        return self._shared.adaptable

    @property
    def is_linear_input(self) -> bool:
        """They go to the router and the gate too, which take exact inputs."""
        return False

    def own_parts(self) -> dict[str, CheckpointPart]:
        """Returns the parts of the router and the gate."""
        return self._mixture.own_parts() | self._gate.parts()

    def finish(self) -> None:
        """Packs the mixture."""
        self._gate.finish()
        self._mixture.finish()

    def __call__(self, x: LinearInput, adapted: AdaptedTokens | None, /) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        mixed = self._mixture(x, adapted)
        return self._ops.add_shared(mixed, self._shared(x, adapted), x, self._gate.numbers[0])


class _OwnMatrix:
    """A matrix that is kept as numbers. MLX alone stores integers of it, which are dequantised."""

    def __init__(self, name: str, numbers: torch.Tensor, quantized: QuantizedWeights | None) -> None:
        self.numbers = numbers
        self._name = name
        self._stored: IntMatrix | None = None
        if isinstance(quantized, IntWeights) and quantized.has_vocabulary and quantized.holds(name):
            rows, columns = map(Span.whole, numbers.shape)
            self._stored = IntMatrix(quantized, {name: rows}, columns, numbers.dtype, numbers.device)

    def parts(self) -> dict[str, CheckpointPart]:
        """Returns what the checkpoint has of it."""
        if self._stored is None:
            return {f"{self._name}.weight": CheckpointPart.whole(self.numbers)}
        return dict(self._stored.parts())

    def finish(self) -> None:
        """Dequantises the integers, once they are filled."""
        if self._stored is not None:
            self.numbers.copy_(self._stored.weights().dequantized(self.numbers.dtype))
            self._stored = None
