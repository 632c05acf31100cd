"""The weights of a checkpoint for a model of transformers; linear layers and experts are packed from the files.

transformers loads a state dict whose values are read when it asks for them. In place of the matrices of linear layers
and experts it gets numbers that take no memory; the matrices go from the files to the operations one by one, in the
format of the checkpoint. What transformers converts in ways of its own it gets dequantised.
"""

import contextlib
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint import decoder_tensors, open_checkpoint
from engine.model.checkpoint_part import CheckpointPart, Span
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_joint import halves_of, with_joint_tensors
from engine.model.gguf_tensors import GgufTensors
from engine.model.linear import Linear
from engine.model.quantization_config import QuantizedWeights
from engine.model.safetensors_file import FP8_NAME
from engine.model.stored_experts import DOWN, GATE_UP, ExpertsShape, PackedLayers, StoredExperts, find_experts
from engine.model.stored_matrix import StoredMatrix, allocate_matrix, check_matrix, stored_shape
from engine.model.tensor_entry import TensorEntry
from engine.model.weights import WeightsReader, is_kv_scale, open_tensors
from kernels.families import reference_ops
from kernels.interface import KernelOps, LinearWeights

_FLOATS_OF_8_BITS = (FP8_NAME, "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_HOST, _META = torch.device("cpu"), torch.device("meta")


class LinearShape(NamedTuple):
    """Sizes of a linear layer.

    Attributes:
        num_rows, num_columns: of its matrix.
        has_bias: whether it has a bias.
    """

    num_rows: int
    num_columns: int
    has_bias: bool


class _Place(NamedTuple):
    """Where a tensor is: its file, its name there, and its entry in the header."""

    file: Path
    name: str
    entry: TensorEntry


class TransformersWeights:
    """The tensors of a checkpoint folder, by the names of the model's parameters.

    Attributes:
        layers: linear layers that are packed from the files.
        tied_head: the output head, if it is; its matrix is the embedding too.
        experts: modules of experts that are.
    """

    def __init__(
        self,
        path: Path,
        layers: Mapping[str, LinearShape],
        experts: Mapping[str, ExpertsShape],
        quantized: QuantizedWeights | None,
        *,
        tied_head: tuple[str, LinearShape] | None = None,
        dtype: torch.dtype,
        model_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Checks headers, and the beginnings of the matrices of linear layers and experts.

        Args:
            path: the folder.
            layers: linear layers of the model by their names.
            experts: its modules of experts, by their names.
            quantized: how the checkpoint quantises linear layers; None: it does not.
            tied_head: name of an embedding that is packed as output head too, and sizes of the head; None: none is.
            dtype: dtype of matrices that are not quantised.
            model_dtype: dtype of the parameters of the model.
            device: device of the packed layers.
        Raises: CheckpointError: a file is broken, or a layer has another shape or format than config.json says.
        """
        self._quantized, self._model_dtype = quantized, model_dtype
        self._places = _places(path)
        modules = {name.rpartition(".")[0] for name in self._places}
        self._matrices = self._quantized_matrices(modules)
        parts: dict[str, CheckpointPart] = {}
        self.layers: dict[str, Linear] = {}
        for name, shape in layers.items():
            halves = halves_of(name, modules)
            stored = quantized if (halves or (name,))[0] in self._matrices else None
            layer = linear_layer(name, shape, stored, dtype, device, halves=halves)
            of_layer = layer.checkpoint_parts()
            if layer.is_quantized == (stored is not None) and all(part in self._places for part in of_layer):
                self.layers[name] = layer
                parts |= of_layer
        self.tied_head = None if tied_head is None else linear_layer(*tied_head, quantized, dtype, device)
        self.experts: dict[str, StoredExperts] = {}
        for name, of_module in experts.items():
            found = find_experts(
                name, of_module, self._places, modules, quantized, self._matrices, dtype=dtype, device=device
            )
            if found is not None:
                self.experts[name] = found
                parts |= found.checkpoint_parts()
        self._packed = {name.rpartition(".")[0] for name in parts}
        self._merged = self._matrices.keys() - self._packed
        for name in self._merged:
            parts |= self._allocate(name, _META).parts()
        self._others = {
            name: place for name, place in self._places.items() if self._is_read_by_transformers(name, parts)
        }
        for place in self._others.values():
            _check_is_no_code(place)
        self._reader, self._lock = WeightsReader(path, parts, others=self._others), threading.Lock()
        self._checkpoint = open_checkpoint(path)
        generator = torch.Generator().manual_seed(0)
        sizes: dict[str, tuple[int, ...]] = {f"{name}.weight": layers[name][:2] for name in self.layers}
        for name in self.experts:
            num_experts, _, hidden, inner, _ = experts[name]
            sizes |= {
                f"{name}.{GATE_UP}": (num_experts, 2 * inner, hidden),
                f"{name}.{DOWN}": (num_experts, hidden, inner),
            }
        self._stand_ins = {name: _stand_in(size, model_dtype, generator) for name, size in sizes.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns what transformers loads: tensors, or what `[...]` reads from a file, in any thread."""
        files = {file: open_tensors(self._checkpoint, file) for file in {place.file for place in self._others.values()}}
        values: dict[str, Any] = {**self._stand_ins}
        values |= {f"{name}.weight": _WhenRead(partial(self.dequantized, name)) for name in self._merged}
        values |= {name: self._value(files[place.file], place.name) for name, place in self._others.items()}
        return with_joint_tensors(values)

    def _value(self, file: Any, name: str) -> Any:
        if not isinstance(file, GgufTensors):
            return file.get_slice(name)

        def read() -> torch.Tensor:
            with self._lock:
                return file.get_tensor(name)

        return _WhenRead(read)

    def check_stand_ins(self, model: Any) -> None:
        """Checks that transformers has not computed a parameter from what stands in for the matrices of a layer.

        Raises: CheckpointError: it has; names the parameter.
        """
        for name, stand_in in self._stand_ins.items():
            weight = model.get_parameter(name)
            is_same = weight.shape == stand_in.shape and all(
                torch.equal(weight.select(dim, 0), stand_in.select(dim, 0).to(weight.dtype))
                for dim in range(weight.ndim)
            )
            if not is_same:
                raise CheckpointError(f"it converts {name} as it loads it")

    @contextlib.contextmanager
    def stand_in(self, model: Any) -> Iterator[None]:
        """Has layers and experts compute little, of each token alone, while the code of a model is checked."""
        modules = {name: model.get_submodule(name) for name in (*self.layers, *self.experts)}
        for name in self.layers:
            modules[name].forward = _selection(*modules[name].weight.shape)
        for name in self.experts:
            modules[name].forward = _of_each_token
        try:
            yield
        finally:
            for module in modules.values():
                del module.forward

    def pack(self, layer: str, ops: KernelOps) -> LinearWeights:
        """Reads a linear layer and packs it, in the format of the checkpoint.

        Raises: CheckpointError: a file cannot be read.
        """
        return self._pack(self.layers[layer], ops)

    def pack_tied_head(self, ops: KernelOps) -> LinearWeights:
        """Reads the embedding and packs it as output head.

        Raises: CheckpointError: a file cannot be read.
        """
        assert self.tied_head is not None
        return self._pack(self.tied_head, ops)

    def _pack(self, layer: Linear, ops: KernelOps) -> LinearWeights:
        layer.load(ops, self._fill)
        return layer.take_packed()[0]

    def pack_experts(self, module: str, ops: KernelOps) -> PackedLayers:
        """Reads the experts of a module and packs them, in the format of the checkpoint.

        Raises: CheckpointError: a file cannot be read.
        """
        return self.experts[module].pack(ops, self._fill)

    def matrix(self, layer: str) -> torch.Tensor:
        """Reads the matrix of a linear layer [rows, columns], dequantised, in the dtype of the model's parameters.

        Raises: CheckpointError: a file cannot be read.
        """
        weight: torch.Tensor = self.pack(layer, reference_ops())[0].to(self._model_dtype)
        return weight

    def dequantized(self, name: str) -> torch.Tensor:
        """Reads a quantised matrix that transformers converts, [rows, columns] fp32 on the host."""
        matrix = self._allocate(name, _HOST)
        self._fill(matrix.parts())
        weight: torch.Tensor = matrix.pack(reference_ops(), None, None)[0]
        return weight

    def _fill(self, parts: dict[str, CheckpointPart]) -> None:
        with self._lock:
            self._reader.fill(parts)

    def _allocate(self, name: str, device: torch.device) -> StoredMatrix:
        num_rows, num_columns = self._matrices[name]
        rows, columns = {name: Span.whole(num_rows)}, Span.whole(num_columns)
        if not isinstance(self._quantized, Fp8Weights):  # whose last blocks may be partial
            check_matrix(self._quantized, rows, columns)
        return allocate_matrix(self._quantized, rows, columns, torch.float32, device)

    def _is_read_by_transformers(self, name: str, parts: Container[str]) -> bool:
        """Whether a tensor is none of a packed or dequantised matrix, nor one that is not used.

        Biases of dequantised matrices are, and those of packed ones that the model has: in `parts`.
        """
        module, _, last = name.rpartition(".")
        if last == "bias" and (name in parts or module in self._merged):
            return True
        return not (module in self._packed or module in self._merged or is_kv_scale(name))

    def _quantized_matrices(self, modules: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Returns the quantised matrices of the files, with their rows and columns.

        Raises: CheckpointError: one has no rows or no columns.
        """
        if self._quantized is None:
            return {}
        shapes = {name: place.entry.shape for name, place in self._places.items()}
        found = {module: stored_shape(self._quantized, module, shapes) for module in modules}
        matrices = {module: shape for module, shape in found.items() if shape is not None}
        if empty := next((module for module, shape in matrices.items() if 0 in shape), None):
            raise CheckpointError(f"quantization_config: {empty} has a matrix of {list(matrices[empty])} numbers")
        return matrices


class _WhenRead:
    """A value of a state dict that is made when it is read."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._read()


def linear_layer(
    name: str,
    shape: LinearShape,
    quantized: QuantizedWeights | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    halves: tuple[str, ...] = (),
) -> Linear:
    """Returns a linear layer by its name, without memory; dense if blocks or groups do not divide its matrix.

    halves: see `halves_of`.
    """
    parent, _, last = name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    columns = Span.whole(shape.num_columns)
    names = [half.removeprefix(prefix) for half in halves] or [last]
    rows = {part: Span.whole(shape.num_rows // len(names)) for part in names}

    def layer(stored: QuantizedWeights | None) -> Linear:
        return Linear(prefix, columns, rows, bias=shape.has_bias, quantized=stored, dtype=dtype, device=device)

    try:
        return layer(quantized)
    except CheckpointError:
        return layer(None)


def _places(path: Path) -> dict[str, _Place]:
    """Returns the tensors of a checkpoint by their names in the decoder.

    Raises: CheckpointError: a file is broken, or two tensors have one name.
    """
    places: dict[str, _Place] = {}
    for name, file, stored, entry in decoder_tensors(open_checkpoint(path)):
        if (other := places.get(name)) is not None:
            raise CheckpointError(f"{file}: tensor {stored} is in {other.file.name} too, as {other.name}")
        places[name] = _Place(file, stored, entry)
    return places


def _check_is_no_code(place: _Place) -> None:
    """Checks that a tensor for transformers is not of codes, which it would take as the numbers themselves.

    Raises: CheckpointError: it is: its scales are missing, or its layout is not known.
    """
    entry = place.entry
    is_matrix = len(entry.shape) >= 2 and (entry.dtype in _FLOATS_OF_8_BITS or place.name.endswith(".weight"))
    if is_matrix and entry.dtype in (*_FLOATS_OF_8_BITS, "I8", "U8"):
        raise CheckpointError(
            f"{place.file}: tensor {place.name} is {entry.dtype} without the scales that quantization_config requires"
        )


def _selection(num_rows: int, num_columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the product by a matrix with one number in each row: some inputs in another order, with other signs."""
    generator = torch.Generator().manual_seed(num_rows)
    columns = torch.randint(num_columns, (num_rows,), generator=generator)
    signs = 1.0 - 2.0 * torch.randint(2, (num_rows,), generator=generator)
    return lambda x: x[..., columns] * signs.to(x.dtype)


def _of_each_token(hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Computes a mixture [T, n] that depends on the experts and weights [T, top_k] of a token."""
    factors: torch.Tensor = (weights * (1 + experts)).sum(dim=-1, keepdim=True).to(hidden.dtype)
    return hidden * torch.tanh(factors)


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Returns random numbers [..., rows, columns], of which each row shares all but two with the next one."""
    strides = tuple(range(len(shape), 0, -1))
    size = 1 + sum(stride * (length - 1) for stride, length in zip(strides, shape, strict=True))
    numbers = torch.randn(size, generator=generator).mul_(shape[-1] ** -0.5)
    return numbers.to(dtype).as_strided(shape, strides)
