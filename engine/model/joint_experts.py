"""Experts that a checkpoint stores together, as Qwen3.5 is published: the decoder loads each projection on its own.

Rows of such a tensor are tensors too: `experts.gate_up_proj` [experts, 2 * inner, hidden] is
`experts.0.gate_proj.weight` and `experts.0.up_proj.weight`, each [inner, hidden], then those of the next expert, and
`experts.down_proj` [experts, hidden, inner] is `experts.0.down_proj.weight` and so on. Qwen3-VL is published with both
transposed, [experts, hidden, 2 * inner] and [experts, inner, hidden]: there columns are, which the shape tells.

MLX stores each projection of all experts as `switch_mlp.up_proj` and so on, and has scales and offsets beside integers.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_part import CheckpointPart
from engine.model.stored_experts import DOWN, GATE_UP
from engine.model.tensor_entry import TensorEntry

_PROJECTIONS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}
_OF_MLX = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3"), "down_proj": ("down_proj", "w2")}
"""Names of MLX, and of the decoder: most models', and Mixtral's."""
_MLX_MODULE = "switch_mlp"


class ExpertRows(NamedTuple):
    """Rows of an expert in a tensor of all experts.

    Attributes:
        tensor: its name in the file.
        expert: number of the expert.
        first, stop: its first row, and the one behind its last.
        is_transposed: whether they are columns instead.
    """

    tensor: str
    expert: int
    first: int
    stop: int
    is_transposed: bool


def split_joint_experts(
    file: Path,
    tensors: dict[str, TensorEntry],
    decoder_name: Callable[[str], str | None],
    parts: Mapping[str, CheckpointPart],
) -> tuple[dict[str, TensorEntry], dict[str, ExpertRows]]:
    """Returns the tensors of a file with one per expert and projection where the model has these, and their places.

    Args:
        file: its path, for errors.
        tensors: as they are in it.
        decoder_name: maps the name of a tensor in a file to the decoder's.
        parts: those of the model by their names in the decoder.

    Raises: CheckpointError: a tensor has another shape than the model's experts together, or one of them is there too.
    """
    split: dict[str, TensorEntry] = {}
    places: dict[str, ExpertRows] = {}
    for stored, entry in tensors.items():
        if f".{_MLX_MODULE}." in stored and (of_mlx := _split_mlx(file, stored, entry, decoder_name, parts)):
            for own_name, (own, place) in of_mlx.items():
                split[own_name], places[own_name] = own, place
            continue
        prefix, _, last = stored.rpartition(".")
        experts = _experts(decoder_name(stored), last, parts) if last in _PROJECTIONS else []
        if not experts:
            split[stored] = entry
            continue
        shape = (len(experts), sum(part.shape[0] for part in experts[0]), experts[0][0].shape[1])
        is_transposed = entry.shape != shape and entry.shape == (shape[0], shape[2], shape[1])
        if entry.shape != shape and not is_transposed:
            raise CheckpointError(
                f"{file}: tensor {stored} has shape {list(entry.shape)}, config.json requires {list(shape)}"
            )
        row_bytes = (entry.stop - entry.start) // (shape[0] * shape[1])
        for expert, projections in enumerate(experts):
            first = 0
            for name, part in zip(_PROJECTIONS[last], projections, strict=True):
                place = ExpertRows(stored, expert, first, first + part.shape[0], is_transposed)
                # Of columns, as many bytes of the same expert: for checks of samples, and sums.
                start, stop = (entry.start + (expert * shape[1] + row) * row_bytes for row in (place.first, place.stop))
                own_name = f"{prefix}.{expert}.{name}.weight"
                if own_name in tensors:
                    raise CheckpointError(f"{file}: tensor {own_name} is in {stored} too")
                split[own_name] = TensorEntry(entry.dtype, part.shape, start, stop)
                places[own_name] = place
                first = place.stop
    return split, places


def _split_mlx(
    file: Path,
    stored: str,
    entry: TensorEntry,
    decoder_name: Callable[[str], str | None],
    parts: Mapping[str, CheckpointPart],
) -> dict[str, tuple[TensorEntry, ExpertRows]]:
    """Returns a projection of each expert in a tensor of MLX by the name it would have; none if the model has none."""
    parent, _, rest = stored.partition(f".{_MLX_MODULE}.")
    projection, _, suffix = rest.partition(".")
    found: dict[str, tuple[TensorEntry, ExpertRows]] = {}
    num_bytes = (entry.stop - entry.start) // max(1, entry.shape[0] if entry.shape else 1)
    for own_projection in _OF_MLX.get(projection, ()):
        while part := parts.get(decoder_name(name := f"{parent}.experts.{len(found)}.{own_projection}.{suffix}") or ""):
            expert, start = len(found), entry.start + len(found) * num_bytes
            own = TensorEntry(entry.dtype, part.shape, start, start + num_bytes)
            found[name] = own, ExpertRows(stored, expert, 0, part.shape[0], is_transposed=False)
        if found:
            shape = (len(found), *next(iter(found.values()))[0].shape)
            if entry.shape != shape:
                raise CheckpointError(
                    f"{file}: tensor {stored} has shape {list(entry.shape)}, config.json requires {list(shape)}"
                )
            break
    return found


def _experts(name: str | None, last: str, parts: Mapping[str, CheckpointPart]) -> list[list[CheckpointPart]]:
    """Returns the parts of each expert in the order of their rows; none if the model does not have them."""
    if name is None or name in parts:
        return []
    prefix = name.removesuffix(last)
    experts: list[list[CheckpointPart]] = []
    while all(f"{prefix}{len(experts)}.{projection}.weight" in parts for projection in _PROJECTIONS[last]):
        experts.append([parts[f"{prefix}{len(experts)}.{projection}.weight"] for projection in _PROJECTIONS[last]])
    return experts


class ExpertReader:
    """Reads tensors of a file that `safetensors.safe_open` opened, rows of experts among them."""

    def __init__(self, reader: Any, places: Mapping[str, ExpertRows]) -> None:
        """Takes the file, and the places of such rows by the names that `split_joint_experts` gave them."""
        self._reader, self._places = reader, places

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor."""
        if name not in self._places:
            tensor: torch.Tensor = self._reader.get_tensor(name)
            return tensor
        return _Rows(self._reader, self._places[name])[:, :]

    def get_slice(self, name: str) -> Any:
        """Returns what reads slices of a tensor."""
        return _Rows(self._reader, self._places[name]) if name in self._places else self._reader.get_slice(name)


class _Rows:
    """What `get_slice` returns for such rows."""

    def __init__(self, reader: Any, place: ExpertRows) -> None:
        self._slices, self._place = reader.get_slice(place.tensor), place

    def __getitem__(self, index: tuple[slice, slice]) -> torch.Tensor:
        place, (rows, columns) = self._place, index
        first, last, _ = rows.indices(place.stop - place.first)
        own = slice(place.first + first, place.first + last)
        if place.is_transposed:
            values: torch.Tensor = self._slices[place.expert, columns, own].transpose(0, 1)
        else:
            values = self._slices[place.expert, own, columns]
        return values
