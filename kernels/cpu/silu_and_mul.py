"""The gate of a SwiGLU feed-forward layer (arXiv:2002.05202), in one pass over memory."""

import numpy as np
import torch

from kernels.cpu.arrays import Array, check_fp32
from kernels.cpu.jit import exp_nonpositive, inline, kernel


@inline
def _silu_and_mul_row(gate: Array, up: Array, out: Array) -> None:
    one = np.float32(1)
    for i in range(gate.shape[0]):
        e = exp_nonpositive(-abs(gate[i]))
        sigmoid = (e if gate[i] < 0 else one) / (one + e)
        out[i] = gate[i] * sigmoid * up[i]


@kernel
def _silu_and_mul(gate_up: Array, out: Array) -> None:
    n = out.shape[1]
    for row in range(out.shape[0]):
        _silu_and_mul_row(gate_up[row, :n], gate_up[row, n:], out[row])


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half.

    Args:
        gate_up: [T, 2 * n] fp32.
    Returns: [T, n] fp32.
    Raises: ValueError: not fp32.
    """
    check_fp32(gate_up=gate_up)
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=torch.float32)
    _silu_and_mul(gate_up.contiguous().numpy(), out.numpy())
    return out
