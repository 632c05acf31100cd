"""Soft cap of attention scores and logits (Gemma 2, arXiv:2408.00118)."""

import torch


def soft_cap(x: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Computes soft_cap * tanh(x / soft_cap) in the dtype of x, of any shape."""
    return soft_cap * torch.tanh(x / soft_cap)
