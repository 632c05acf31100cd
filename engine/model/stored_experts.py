"""Experts of a model of transformers as checkpoints store them: which tensors they are, and how they are packed.

transformers has one parameter for all experts of a layer, and merges into it what most checkpoints store expert by
expert. Here experts are read one by one.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_part import CheckpointPart, Fill, Span
from engine.model.fp8 import Fp8Weights
from engine.model.linear import Linear
from engine.model.quantization_config import QuantizedWeights
from kernels.fp8_weights import FP8_DTYPE
from kernels.gates import Gate
from kernels.interface import KernelOps, LinearWeights

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of the parameters of a module of experts: [experts, 2 * inner, hidden] and [experts, hidden, inner]."""

_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the linear layers of an expert in checkpoints: gate, up and down."""

_JOINT = (
    ("{name}.gate_up_proj", "{name}.down_proj"),
    ("{parent}.input_linear.weight", "{parent}.output_linear.weight"),
)
"""Names of tensors of all experts of a module in checkpoints; the second ones are Granite's."""

_OLD_PARENT = "block_sparse_moe"
"""Name of the parent of experts in checkpoints older than the name of transformers, as those of Mixtral."""


class ExpertsShape(NamedTuple):
    """A module of experts, each down(gate(gate_up(x))) without biases.

    Attributes:
        num_experts: how many.
        top_k: of them compute a token.
        hidden, inner: sizes of their inputs and results, and between their two layers.
        gate: the operation between the layers.
    """

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    gate: Gate


class PackedLayers(NamedTuple):
    """The packed layers of each expert of a module."""

    gate_up: list[LinearWeights]
    down: list[LinearWeights]


class StoredExperts(Protocol):
    """Experts of one module in the format of a checkpoint."""

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills, without memory."""
        ...

    def pack(self, ops: KernelOps, fill: Fill) -> PackedLayers:
        """Reads and packs one expert after the other."""
        ...


class _SeparateExperts:
    """Tensors of their own for each expert and projection, quantised or not."""

    def __init__(
        self,
        prefix: str,
        projections: tuple[str, str, str],
        shape: ExpertsShape,
        quantized: QuantizedWeights | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        gate, up, down = projections
        hidden, inner = Span.whole(shape.hidden), Span.whole(shape.inner)

        def layers(columns: Span, rows: Mapping[str, Span]) -> list[Linear]:
            return [
                Linear(f"{prefix}.{e}.", columns, rows, bias=False, quantized=quantized, dtype=dtype, device=device)
                for e in range(shape.num_experts)
            ]

        self._gate_up, self._down = layers(hidden, {gate: inner, up: inner}), layers(inner, {down: hidden})

    def are_quantized_as(self, matrices: Collection[str]) -> bool:
        """Whether the quantised projections are those whose names are in `matrices`."""
        layers = *self._gate_up, *self._down
        return all(layer.is_quantized == (name in matrices) for layer in layers for name in layer.names)

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        parts: dict[str, CheckpointPart] = {}
        for layer in (*self._gate_up, *self._down):
            parts |= layer.checkpoint_parts()
        return parts

    def pack(self, ops: KernelOps, fill: Fill) -> PackedLayers:
        def packed(layers: list[Linear]) -> list[LinearWeights]:
            for layer in layers:
                layer.load(ops, fill)
            return [weights for layer in layers for weights in layer.take_packed()]

        return PackedLayers(packed(self._gate_up), packed(self._down))


class _JointExperts:
    """Two tensors for all experts of a layer, in the shapes of the parameters; or 8-bit floats with a scale per row."""

    def __init__(
        self,
        gate_up: str,
        down: str,
        shape: ExpertsShape,
        quantized: Fp8Weights | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = {
            gate_up: (shape.num_experts, 2 * shape.inner, shape.hidden),
            down: (shape.num_experts, shape.hidden, shape.inner),
        }
        self._quantized, self._dtype, self._device = quantized, dtype, device

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        parts: dict[str, CheckpointPart] = {}
        for name, shape in self._shapes.items():
            parts |= self._allocate(name, shape, Span.whole(shape[0]), torch.device("meta"))
        return parts

    def _allocate(
        self, name: str, shape: tuple[int, int, int], experts: Span, device: torch.device
    ) -> dict[str, CheckpointPart]:
        """Returns the weights of some experts, and their scales if they are quantised, uninitialised."""
        _, num_rows, num_columns = shape

        def part(num_columns: int, dtype: torch.dtype) -> CheckpointPart:
            values = torch.empty(experts.size, num_rows, num_columns, dtype=dtype, device=device)
            return CheckpointPart(values, (experts, Span.whole(num_rows), Span.whole(num_columns)))

        if self._quantized is None:
            return {name: part(num_columns, self._dtype)}
        scales = _scales_of(name, self._quantized)
        return {name: part(num_columns, FP8_DTYPE), scales: part(1, torch.float32)}

    def pack(self, ops: KernelOps, fill: Fill) -> PackedLayers:
        def packed(name: str, shape: tuple[int, int, int]) -> list[LinearWeights]:
            layers = []
            for expert in range(shape[0]):
                parts = self._allocate(name, shape, Span(shape[0], expert, 1), self._device)
                fill(parts)
                weight, *scales = (part.tensor[0] for part in parts.values())
                layers.append(
                    ops.pack_quantized(weight, scales[0], None, self._dtype)
                    if scales
                    else ops.pack_linear(weight, None)
                )
            return layers

        gate_up, down = (packed(name, shape) for name, shape in self._shapes.items())
        return PackedLayers(gate_up, down)


def _scales_of(weight: str, quantized: Fp8Weights) -> str:
    """Returns the name of the scales of all experts, beside that of their weights."""
    return f"{weight.rpartition('.')[0]}.{quantized.scale_name}"


def names_of_first(name: str, quantized: QuantizedWeights | None) -> tuple[str, str]:
    """Returns what a checkpoint calls the layers up and down of the first expert of a module, if it quantises them."""
    names = [(f"{name}.0.{up}", f"{name}.0.{down}") for _, up, down in _PROJECTIONS]
    return next((pair for pair in names if quantized is not None and quantized.holds(pair[0])), names[0])


def find_experts(
    name: str,
    shape: ExpertsShape,
    tensors: Collection[str],
    modules: Collection[str],
    quantized: QuantizedWeights | None,
    matrices: Collection[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> StoredExperts | None:
    """Returns the experts of a module, without memory; None: they are stored in a way that only transformers knows.

    Args:
        name: of the module.
        shape: of its experts.
        tensors: names of all tensors of the checkpoint.
        modules: names of all modules that have them.
        quantized: how it quantises linear layers; None: it does not.
        matrices: names of the modules that it quantises.
        dtype: dtype of matrices that are not quantised.
        device: device of the packed layers.
    """
    parent, _, last = name.rpartition(".")
    for templates in _JOINT:
        gate_up, down = (template.format(name=name, parent=parent) for template in templates)
        if gate_up in tensors and down in tensors:
            of_rows = quantized if isinstance(quantized, Fp8Weights) and not quantized.has_blocks else None
            if of_rows is not None and not all(_scales_of(weight, of_rows) in tensors for weight in (gate_up, down)):
                of_rows = None
            return _JointExperts(gate_up, down, shape, of_rows, dtype, device)
    for prefix in (name, f"{parent.rpartition('.')[0]}.{_OLD_PARENT}.{last}"):
        for projections in _PROJECTIONS:
            if f"{prefix}.{shape.num_experts - 1}.{projections[0]}" not in modules:
                continue
            stored = quantized if f"{prefix}.0.{projections[0]}" in matrices else None
            try:
                experts = _SeparateExperts(prefix, projections, shape, stored, dtype, device)
            except CheckpointError:  # blocks or groups that do not divide the matrices
                continue
            if experts.are_quantized_as(matrices) and all(part in tensors for part in experts.checkpoint_parts()):
                return experts
    return None
