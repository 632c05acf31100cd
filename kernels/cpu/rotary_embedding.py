"""Rotary position embedding in place, half-split layout (arXiv:2104.09864)."""

import torch

from kernels.cpu.arrays import Array, check_fp32, flat_rows
from kernels.cpu.jit import inline, kernel


@inline
def _rotate_halves(first: Array, second: Array, cos: Array, sin: Array) -> None:
    for i in range(first.shape[0]):
        a, b = first[i], second[i]
        first[i] = a * cos[i] - b * sin[i]
        second[i] = b * cos[i] + a * sin[i]


@kernel
def _rotary_embedding(x: Array, step: int, num_heads: int, positions: Array, cos: Array, sin: Array) -> None:
    half = cos.shape[1]
    for token in range(positions.shape[0]):
        position = positions[token]
        for head in range(num_heads):
            start = token * step + head * 2 * half
            _rotate_halves(x[start : start + half], x[start + half : start + 2 * half], cos[position], sin[position])


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Rotates q and k in place; dimension i of the first half pairs with dimension i of the second.

    Args:
        q: [T, num_heads, head_dim] fp32; rows may be apart, as those of a slice of the fused QKV are.
        k: [T, num_kv_heads, head_dim] fp32, likewise.
        positions: [T] int64, rows of the tables.
        cos, sin: [max_positions, head_dim // 2] fp32.
    Raises: ValueError: not fp32, shapes disagree, or rows that are not contiguous.
    """
    check_fp32(q=q, k=k, cos=cos, sin=sin)
    if q.shape[2] != 2 * cos.shape[1]:
        raise ValueError(f"head_dim is {q.shape[2]}, the tables have {cos.shape[1]} pairs")
    for x in (q, k):
        rows, step = flat_rows(x)
        _rotary_embedding(rows, step, x.shape[1], positions.numpy(), cos.numpy(), sin.numpy())
