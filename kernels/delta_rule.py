"""Weights and state of a gated delta rule layer (Gated DeltaNet, arXiv:2412.06464), for all families of kernels.

Such a layer keeps a matrix per head instead of keys and values of all tokens. For each token, in order,

    S = g S;  S = S + k (beta (v - S^T k))^T;  out = S^T q,

where S [key_dim, value_dim] begins as zero. q, k and v have gone through a short causal convolution and SiLU; q and k
have length one, and q is divided by sqrt(key_dim). beta = sigmoid(b), g = exp(-exp(A_log) softplus(a + dt_bias)).
Each head of `out` is normed (RMSNorm) and multiplied by silu(z).
"""

from dataclasses import dataclass

import torch

from kernels.delta_heads import DeltaHeads

NORM_EPS = 1e-6
"""Added to the squared lengths of queries and keys."""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a layer besides its projections, all fp32.

    Attributes:
        heads: sizes.
        conv: [conv_width, num_channels], oldest token first.
        decay: [num_value_heads], exp(A_log).
        dt_bias: [num_value_heads].
        norm: [value_dim].
        eps: of the norm of each head's result.
    """

    heads: DeltaHeads
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """What a layer keeps of each request, fp32, by `AttentionMetadata.state_slots`.

    The first tokens of a request do not read its slot. Slots may lie apart: a model has those of all layers together.

    Attributes:
        conv: [num_slots, conv_width - 1, num_channels], the last inputs of the convolution, oldest first.
        recurrent: [num_slots, num_value_heads, key_dim, value_dim].
    """

    conv: torch.Tensor
    recurrent: torch.Tensor

    @classmethod
    def zeros(cls, heads: DeltaHeads, num_slots: int, device: torch.device) -> "DeltaStates":
        """Allocates the states of `num_slots` requests; on a CPU, memory is taken up when a slot is first written."""
        return cls.of(torch.zeros(num_slots, heads.state_size, device=device), heads)

    @classmethod
    def of(cls, memory: torch.Tensor, heads: DeltaHeads) -> "DeltaStates":
        """Returns the states in columns of memory, [num_slots, heads.state_size] fp32."""
        num_slots, size = len(memory), heads.num_value_heads * heads.key_dim * heads.value_dim
        return cls(
            memory[:, size:].view(num_slots, heads.conv_width - 1, heads.num_channels),
            memory[:, :size].view(num_slots, heads.num_value_heads, heads.key_dim, heads.value_dim),
        )


def check_delta(
    x: torch.Tensor, gates: torch.Tensor, weights: DeltaWeights, states: DeltaStates, state_slots: torch.Tensor | None
) -> torch.Tensor:
    """Returns the slots of the rows.

    Raises: ValueError: shapes disagree, weights or states are not fp32 without gaps, or the batch names no slots.
    """
    heads = weights.heads
    if heads.num_value_heads % heads.num_key_heads:
        raise ValueError(f"{heads.num_value_heads} value heads are not a multiple of {heads.num_key_heads} key heads")
    expected = len(x), heads.num_channels + heads.value_size
    if x.shape != expected or gates.shape != (len(x), 2 * heads.num_value_heads):
        raise ValueError(
            f"x is {list(x.shape)} and gates {list(gates.shape)}, expected {list(expected)} and "
            f"{[len(x), 2 * heads.num_value_heads]}"
        )
    if weights.conv.shape != (heads.conv_width, heads.num_channels):
        raise ValueError(f"conv is {list(weights.conv.shape)}, expected {[heads.conv_width, heads.num_channels]}")
    shapes = states.conv.shape[1:], states.recurrent.shape[1:]
    if shapes != (
        (heads.conv_width - 1, heads.num_channels),
        (heads.num_value_heads, heads.key_dim, heads.value_dim),
    ):
        raise ValueError(f"states of a request are {list(shapes[0])} and {list(shapes[1])}, which {heads} do not fit")
    for name, tensor, whole in (
        ("conv", weights.conv, weights.conv),
        ("decay", weights.decay, weights.decay),
        ("dt_bias", weights.dt_bias, weights.dt_bias),
        ("norm", weights.norm, weights.norm),
        ("states.conv", states.conv, states.conv[:1]),
        ("states.recurrent", states.recurrent, states.recurrent[:1]),
    ):
        if tensor.dtype is not torch.float32 or not whole.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} with strides {tensor.stride()}; expected whole rows in float32")
    if state_slots is None:
        raise ValueError("the batch has no state_slots")
    return state_slots
