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


class LatentHeads:
    """The matrices of one layer, [heads, size of a key without rotation, or of a value; size of a latent].

    They are views of the weights of the layer's `kv_b_proj`, which is not called and stays a plain matrix.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._key_dim = module.qk_nope_head_dim

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self._module.kv_b_proj.weight
        both = weight.view(-1, self._key_dim + self._module.v_head_dim, weight.shape[1])
        return both[:, : self._key_dim], both[:, self._key_dim :]

    def of_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Returns queries of latents and shared keys [1, heads, T, n], for queries of expanded keys."""
        of_keys, _ = self._weights()
        plain, rotated = query[0, :, :, : self._key_dim], query[0, :, :, self._key_dim :]
        return torch.cat([_multiply(plain, of_keys), rotated], dim=2)[None]

    def of_values(self, latents: torch.Tensor) -> torch.Tensor:
        """Returns means of expanded values [1, T, heads, size of a value], for means of latents."""
        _, of_values = self._weights()
        return _multiply(latents[0].transpose(0, 1), of_values.transpose(1, 2)).transpose(0, 1).contiguous()[None]


def keep_latents(model: Any) -> tuple[Any, ...]:
    """Has the layers of a model that can do so attend over latents, by `LatentHeads` in `module.chairlift_latents`.

    Returns: linear layers whose weights these layers use, which must stay as they are.
    """
    layers = [module for module in model.modules() if hasattr(module, "expand_kv") and module.kv_b_proj.bias is None]
    for module in layers:
        module.chairlift_latents = LatentHeads(module)
        module.expand_kv = _latents
    return tuple(module.kv_b_proj for module in layers)


def _latents(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns one head of keys and values in place of expanded ones; both arguments are [1, 1, T, size]."""
    return torch.cat([kv_nope, k_rot], dim=-1), kv_nope


def _multiply(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the products of each head's rows [heads, T, in] by its weights [heads, in, out]."""
    if rows.shape[1] > _FEW_TOKENS:
        return torch.bmm(rows, weights)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return torch.bmm(rows, weights)
    finally:
        torch.set_num_threads(num_threads)
