"""LoRA adapters of models of transformers: which linear layers they can change, and the tokens that a step changes.

Adapters belong to tokens by their places in the step. So a layer can have some only if its inputs are all tokens of a
step in their order. A layer with state gets the tokens of one request at a time, and others get chosen tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.model.linear_adapters import LinearAdapters
from engine.model.transformers_states import StatefulLayer
from kernels.metadata import AdaptedTokens


class LinearProbe:
    """Finds the linear layers that adapters can change, while a model computes a few tokens."""

    def __init__(self, model: Any) -> None:
        """Observes all linear layers; the model is for probing only."""
        self._inputs: dict[str, list[torch.Size]] = {}
        for name, module in model.named_modules():
            if type(module) is torch.nn.Linear:
                self._observe(name, module)

    def _observe(self, name: str, module: torch.nn.Linear) -> None:
        self._inputs[name] = []
        module.register_forward_pre_hook(lambda _, inputs: self._inputs[name].append(inputs[0].shape[:-1]))

    def adaptable(self, num_tokens: int, stateful: Sequence[StatefulLayer]) -> frozenset[str]:
        """Returns the layers that always got the tokens as rows, outside of layers with state.

        Args:
            num_tokens: tokens of the step that the model has computed.
            stateful: its layers with state.
        """
        own = tuple(f"{layer.name}." for layer in stateful)
        return frozenset(
            name
            for name, inputs in self._inputs.items()
            if inputs and all(rows.numel() == num_tokens for rows in inputs) and not name.startswith(own)
        )


class StepAdapters:
    """The adapters of all layers that can have some, and the tokens of the step that is computed.

    Attributes:
        layers: adapters by the name of the layer.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Takes rows and columns of each layer."""
        self.layers = {
            name: LinearAdapters(num_columns, {name: slice(0, num_rows)})
            for name, (num_rows, num_columns) in shapes.items()
        }
        self._adapted: AdaptedTokens | None = None  # none, if no token has an adapter
        self._num_tokens = 0

    def begin(self, num_tokens: int, adapted: AdaptedTokens | None) -> None:
        """Sets the tokens of the step that is computed next, and those of them with an adapter."""
        self._num_tokens = num_tokens
        self._adapted = adapted if adapted is not None and len(adapted.indices) else None

    def add(self, layer: str, y: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the changes of a layer to its results y [T, rows] of inputs x [T, columns], in place.

        Raises: ValueError: the model has called the layer with other rows than in the probe.
        """
        if self._adapted is None:
            return
        if len(x) != self._num_tokens:
            raise ValueError(f"{layer} got {len(x)} rows in a step of {self._num_tokens} tokens, some with an adapter")
        self.layers[layer].add(y, x, self._adapted)
