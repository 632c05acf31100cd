"""Attention over latents: multi-head latent attention (MLA) of transformers with a small KV cache.

Such a layer computes the keys and values of all heads from one latent vector of each token, and from a rotated key that
all heads share (DeepSeek-V2, arXiv:2405.04434, section 2.1). The cache keeps these two in place of the keys and values:
one head, not dozens. The matrix that would expand latents to keys is applied to the queries instead, and the one for
values to the result, which is the same function in another order of summation.
"""

from typing import Any

import torch

_FEW_TOKENS = 8
"""A product of so few takes less time on one thread than a second one takes to start on a busy machine."""


def keep_latents(model: Any) -> tuple[Any, ...]:
    """Has the layers of a model that can do so attend over latents; they have `chairlift_keeps_latents`.

    Returns: linear layers `kv_b_proj`, which are not called: their weights must stay plain matrices.
    """
    layers = [module for module in model.modules() if hasattr(module, "expand_kv") and module.kv_b_proj.bias is None]
    for module in layers:
        module.chairlift_keeps_latents = True
        module.expand_kv = _latents
    return tuple(module.kv_b_proj for module in layers)


def queries_of_latents(layer: Any, query: torch.Tensor) -> torch.Tensor:
    """Returns queries of latents and shared keys [1, heads, T, n], for a layer's queries of expanded keys."""
    key_dim = layer.qk_nope_head_dim
    plain, rotated = query[0, :, :, :key_dim], query[0, :, :, key_dim:]
    return torch.cat([_multiply(plain, _expansion(layer)[:, :key_dim]), rotated], dim=2)[None]


def means_of_values(layer: Any, latents: torch.Tensor) -> torch.Tensor:
    """Returns means of a layer's expanded values [1, T, heads, size of a value], for means of latents."""
    of_values = _expansion(layer)[:, layer.qk_nope_head_dim :]
    return _multiply(latents[0].transpose(0, 1), of_values.transpose(1, 2)).transpose(0, 1).contiguous()[None]


def _expansion(layer: Any) -> torch.Tensor:
    """Returns what expands latents: [heads, sizes of a key without rotation and of a value, size of a latent]."""
    weight: torch.Tensor = layer.kv_b_proj.weight
    return weight.view(-1, layer.qk_nope_head_dim + layer.v_head_dim, weight.shape[1])


def _latents(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns one head of keys and values in place of expanded ones; both arguments are [1, 1, T, size]."""
    return torch.cat([kv_nope, k_rot], dim=-1), kv_nope


def _multiply(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the products of each head's rows [heads, T, in] by its weights [heads, in, out]."""
    if rows.shape[1] > _FEW_TOKENS or rows.device.type != "cpu":
        return torch.bmm(rows, weights)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return torch.bmm(rows, weights)
    finally:
        torch.set_num_threads(num_threads)
