"""Replaces linear layers and experts of a model of transformers by packed ones that `KernelOps` computes."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from engine.model.stored_experts import DOWN, GATE_UP, ExpertsShape, PackedLayers
from engine.model.transformers_adapters import StepAdapters
from engine.model.transformers_experts import PackedMixture, set_experts
from engine.model.transformers_weights import TransformersWeights
from engine.model.weights import Progress
from kernels.interface import KernelOps, LinearWeights

AddAdapters = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds what adapters change to the results [T, rows] of a layer of inputs [T, columns], in place."""


def pack_model(
    model: Any,
    ops: KernelOps,
    stored: TransformersWeights | None,
    experts: Mapping[str, ExpertsShape],
    uncalled: Collection[Any],
    adapters: StepAdapters,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Packs one module after the other, and moves all other parameters to the device.

    Args:
        model: with its parameters, on the host.
        ops: compute packed modules.
        stored: the checkpoint, from which layers are read; None, and for others: the model has their weights.
        experts: modules of experts that `ops` compute, by name.
        uncalled: linear layers whose weights are used in other ways, and stay as they are.
        adapters: change the results of some linear layers.
        dtype: dtype of matrices that a checkpoint does not quantise.
        device: of the steps.
        progress: called after each module.
    Raises: CheckpointError: a file cannot be read.
    """

    def packed(weight: torch.Tensor, bias: torch.Tensor | None = None, *, for_logits: bool = False) -> LinearWeights:
        weight, bias = weight.detach().to(device, dtype), None if bias is None else bias.detach().to(device, dtype)
        return ops.pack_linear(weight.contiguous(), bias, for_logits=for_logits)

    def linear(name: str, layer: Any) -> LinearWeights:
        if stored is not None and name in stored.layers:
            return stored.pack(name, ops)
        if stored is not None and layer is head and stored.tied_head is not None:
            return stored.pack_tied_head(ops)
        weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight  # Conv1D: [in, out]
        return packed(weight, layer.bias, for_logits=layer is head)

    def mixture(name: str, module: Any) -> PackedLayers:
        if stored is not None and name in stored.experts:
            return stored.pack_experts(name, ops)
        gate_up, down = ([packed(weight) for weight in getattr(module, part)] for part in (GATE_UP, DOWN))
        return PackedLayers(gate_up, down)

    head = model.get_output_embeddings()
    done, total = 0, sum(part.nbytes for part in model.parameters())
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            name = f"{parent_name}.{child_name}".removeprefix(".")
            is_linear = type(child) in (torch.nn.Linear, Conv1D)
            if not is_linear and name not in experts:
                continue
            if child in uncalled:
                if stored is not None and name in stored.layers:
                    child.weight = torch.nn.Parameter(stored.matrix(name), requires_grad=False)
                continue
            done += sum(part.nbytes for part in child.parameters())
            if is_linear:
                add = partial(adapters.add, name) if name in adapters.layers else None
                setattr(parent, child_name, _PackedLinear(ops, linear(name, child), child, add))
            else:
                set_experts(child, PackedMixture(ops, experts[name], mixture(name, child)))
            if progress is not None:
                progress(done, total)
    model.to(device)
    if progress is not None:
        progress(total, total)


class _PackedLinear(torch.nn.Module):
    """A linear layer computed by `KernelOps`.

    Attributes:
        weight: without values: the code around some layers looks at its dtype or shape.
    """

    def __init__(self, ops: KernelOps, packed: LinearWeights, layer: Any, add_adapters: AddAdapters | None) -> None:
        """Takes the packed weights of a layer of transformers; and what adds adapters to its results, if it can."""
        super().__init__()
        self._ops, self._packed, self._add_adapters = ops, packed, add_adapters
        self._num_out = layer.weight.shape[1 if isinstance(layer, Conv1D) else 0]
        self.weight = torch.empty_like(layer.weight, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = self._ops.linear(rows, self._packed)
        if self._add_adapters is not None:
            self._add_adapters(y, rows)
        return y.view(*x.shape[:-1], self._num_out)
