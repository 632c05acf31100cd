"""Gates of feed-forward layers (arXiv:2002.05202)."""

import torch

from kernels.gates import ClampedGate, Gate


def gate_and_mul(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Gates the second half by the first one.

    Args:
        gate_up: [T, 2 * n].
        gate: see `kernels.interface`.
    Returns: [T, n], dtype of gate_up; computed in fp32.
    """
    first, up = gate_up.float().chunk(2, dim=-1)
    if isinstance(gate, ClampedGate):
        first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        gated = (up + 1) * first * torch.sigmoid(gate.alpha * first)
    elif gate == "gelu_and_mul":
        gated = torch.nn.functional.gelu(first, approximate="tanh") * up
    else:
        gated = first * torch.sigmoid(first) * up
    return gated.to(gate_up.dtype)


def gate_columns(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Computes x * sigmoid(gate).

    Args:
        x, gate: [T, n].
    Returns: [T, n], dtype of x; computed in fp32.
    """
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def add_shared(mixed: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Computes mixed + sigmoid(x . gate) * shared.

    Args:
        mixed, shared, x: [T, n].
        gate: [n].
    Returns: [T, n], dtype of mixed; computed in fp32.
    """
    factors = torch.sigmoid(x.float() @ gate.float())
    return (mixed.float() + factors[:, None] * shared.float()).to(mixed.dtype)
