"""Gates between the two layers of a feed-forward network; see `kernels.interface.KernelOps.gate_and_mul`."""

from typing import Literal, NamedTuple, TypeAlias


class ClampedGate(NamedTuple):
    """The gate of gpt-oss (arXiv:2508.10925): (up + 1) * gate * sigmoid(alpha * gate), of clamped halves.

    Attributes:
        alpha: factor in the sigmoid.
        limit: largest value of gate, and largest absolute value of up.
    """

    alpha: float
    limit: float


Gate: TypeAlias = Literal["silu_and_mul", "gelu_and_mul"] | ClampedGate
