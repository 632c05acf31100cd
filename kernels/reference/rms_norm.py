"""RMSNorm, plain and after a residual addition (arXiv:1910.07467)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales each vector to a root mean square of one, then by `weight`.

    Args:
        x: [..., n], any float dtype.
        weight: [n].
        eps: added to the mean square.
    Returns: [..., n], dtype of x; computed in fp32.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual stream and norms the sum.

    Args:
        x, residual: [..., n], same dtype.
        weight: [n].
        eps: added to the mean square.
    Returns: (rms_norm(x + residual), x + residual).
    """
    residual = x + residual
    return rms_norm(residual, weight, eps), residual
