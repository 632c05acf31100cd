"""Tensors that llama.cpp stores in two and a decoder of transformers has as one.

These are the expansion of latents to keys and values (DeepSeek, arXiv:2405.04434), and gate and up of Granite.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from engine.errors import CheckpointError

_GATE, _UP = ".gate_proj", ".up_proj"
_GATED = ".input_linear"


def halves_of(layer: str, modules: Collection[str]) -> tuple[str, ...]:
    """Returns the two modules of a file whose matrices, one below the other, are that of a linear layer; (): none."""
    halves = (f"{layer}{_GATE}", f"{layer}{_UP}")
    return halves if layer.endswith(_GATED) and all(half in modules for half in halves) else ()


def with_joint_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a decoder with one in place of two.

    tensors: by their names, or what `[...]` reads; the two may be in different files of a split.
    """
    joint = dict(tensors)
    for name in tensors:
        for first, second, whole, join in _JOINTS:
            prefix = name.removesuffix(first)
            if prefix != name and f"{prefix}{second}" in joint:
                joint[f"{prefix}{whole}"] = _Joint(prefix, joint.pop(name), joint.pop(f"{prefix}{second}"), join)
    return joint


def _expansion(prefix: str, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns [heads * (size of a key without rotation + size of a value), size of a latent]."""
    if keys.ndim != 3 or values.ndim != 3 or keys.shape[:2] != (values.shape[0], values.shape[2]):
        raise CheckpointError(
            f"{prefix}: attn_k_b has shape {list(keys.shape)} and attn_v_b {list(values.shape)}, expected [heads, "
            "latent, key] and [heads, value, latent]"
        )
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def _gated(prefix: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns both matrices, one below the other."""
    if gate.shape != up.shape:
        raise CheckpointError(f"{prefix}: gate has shape {list(gate.shape)} and up {list(up.shape)}, expected the same")
    return torch.cat((gate, up))


_JOINTS: tuple[tuple[str, str, str, Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]], ...] = (
    (".k_b_proj.weight", ".v_b_proj.weight", ".kv_b_proj.weight", _expansion),
    (f"{_GATED}{_GATE}.weight", f"{_GATED}{_UP}.weight", f"{_GATED}.weight", _gated),
)
"""Ends of the names of two tensors, the end of the one's name, and what makes it."""


class _Joint:
    """One tensor, made of two when it is read."""

    def __init__(
        self, prefix: str, first: Any, second: Any, join: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        self._prefix, self._first, self._second, self._join = prefix, first, second, join

    def __getitem__(self, _: Any) -> torch.Tensor:
        """Returns the tensor.

        Raises: CheckpointError: the two do not fit each other.
        """
        return self._join(self._prefix, self._first[...], self._second[...])
