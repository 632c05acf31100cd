"""LoRA adapters of models of transformers: which linear layers they can change, and the tokens that a step changes.

Adapters belong to tokens by their places in the step. So a layer can have some only if it is known which tokens its
inputs are: all of a step in their order, or within a layer with state those of a group of requests.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from engine.model.linear_adapters import LinearAdapters
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

    def adaptable(self, num_tokens: int) -> frozenset[str]:
        """Returns the layers that were called, always with the tokens as rows.

        Args:
            num_tokens: tokens of the step that the model has computed.
        """
        return frozenset(
            name
            for name, inputs in self._inputs.items()
            if inputs and all(rows.numel() == num_tokens for rows in inputs)
        )


class _Rows(NamedTuple):
    """Inputs of the layers that are called next.

    Attributes:
        num_tokens: their rows.
        adapted: rows with an adapter; None: there are none.
    """

    num_tokens: int
    adapted: AdaptedTokens | None


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
        self._step = self._rows = _Rows(0, None)
        self._of_tokens: list[int] = []
        self._parts: dict[Sequence[int], _Rows] = {}

    def begin(self, num_tokens: int, adapted: AdaptedTokens | None) -> None:
        """Sets the tokens of the step that is computed next, and those of them with an adapter."""
        self._step = self._rows = _Rows(num_tokens, adapted if adapted is not None and len(adapted.indices) else None)
        self._of_tokens, self._parts = [], {}

    def select(self, tokens: Sequence[int] | None) -> None:
        """Sets which tokens of the step are the rows of the layers that are called next; None: all of them."""
        if tokens is None or self._step.adapted is None:
            self._rows = self._step
            return
        if tokens not in self._parts:
            self._parts[tokens] = self._part(tokens, self._step.adapted)
        self._rows = self._parts[tokens]

    def _part(self, tokens: Sequence[int], adapted: AdaptedTokens) -> _Rows:
        if not self._of_tokens:  # from a GPU once in a step, for which the host waits
            self._of_tokens = [-1] * self._step.num_tokens
            for token, adapter in zip(adapted.indices.tolist(), adapted.adapters.tolist(), strict=True):
                self._of_tokens[token] = adapter
        chosen = [(self._of_tokens[token], row) for row, token in enumerate(tokens) if self._of_tokens[token] >= 0]
        if not chosen:
            return _Rows(len(tokens), None)
        adapters, rows = torch.tensor(sorted(chosen)).t().contiguous().to(adapted.indices.device)
        return _Rows(len(tokens), AdaptedTokens(rows, adapters))

    def add(self, layer: str, y: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the changes of a layer to its results y [T, rows] of inputs x [T, columns], in place.

        Raises: ValueError: the model has called the layer with other rows than in the probe.
        """
        num_tokens, adapted = self._rows
        if adapted is None:
            return
        if len(x) != num_tokens:
            raise ValueError(f"{layer} got {len(x)} rows for {num_tokens} tokens, some of which have an adapter")
        self.layers[layer].add(y, x, adapted)
