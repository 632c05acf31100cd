"""Rotary position embedding, half-split layout (arXiv:2104.09864)."""

import torch


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Rotates q and k in place; dimension i of the first half pairs with dimension i of the second.

    Args:
        q: [T, num_heads, head_dim].
        k: [T, num_kv_heads, head_dim].
        positions: [T] int64, rows of the tables.
        cos, sin: [max_positions, head_dim // 2], fp32.
    """
    cos_rows, sin_rows = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, head_dim // 2]
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos_rows - second * sin_rows, second * cos_rows + first * sin_rows), dim=-1))
