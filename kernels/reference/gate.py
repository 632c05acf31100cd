"""Gates of feed-forward layers (arXiv:2002.05202)."""

import torch

from kernels.interface import ClampedGate


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes silu(first half) * second half.

    Args:
        gate_up: [T, 2 * n].
    Returns: [T, n], dtype of gate_up; computed in fp32.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes gelu(first half) * second half, with the tanh approximation of GELU (arXiv:1606.08415).

    Arguments and result as in `silu_and_mul`.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


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


def clamped_gate(gate_up: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
    """Computes (up + 1) * g * sigmoid(alpha * g) of the first half g and the second half up, both clamped.

    Arguments and result as in `silu_and_mul`.
    """
    first, up = gate_up.float().chunk(2, dim=-1)
    first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return ((up + 1) * first * torch.sigmoid(gate.alpha * first)).to(gate_up.dtype)
