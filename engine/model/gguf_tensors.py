"""Reads tensors of a GGUF file, with the interface of a file that `safetensors.safe_open` opened."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_file import open_regular
from engine.model.gguf_blocks import unpack
from engine.model.gguf_file import LOADED_TYPES, QUANTIZED_TYPES, REQUANTIZED_TYPES
from engine.model.gguf_requantization import as_q8_0, dequantized
from engine.model.gguf_tensor_layout import TensorLayout
from engine.model.tensor_entry import TensorEntry

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NUMBERS_AT_A_TIME = 1 << 22


class GgufTensors:
    """The tensors of a file as those of `transformers`, blocks dequantised to float32."""

    def __init__(self, file: Path, entries: Mapping[str, TensorEntry], layout: Callable[[str], TensorLayout]) -> None:
        """Opens the file.

        Args:
            file: the path.
            entries: its tensors.
            layout: see `GgufCheckpoint.layout`.
        Raises: FileNotFoundError, CheckpointError: see `open_regular`.
        """
        self._path, self._entries, self._layout = file, entries, layout
        self._file = open_regular(file)
        weakref.finalize(self, self._file.close)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor in its dtype, or in float32 if it is stored in blocks.

        Raises:
            CheckpointError: the file is shorter than its header says, a scale is NaN or infinite, or a number is not
                one of those that its layout allows.
            OSError: it cannot be read.
        """
        entry = self._entries[name]
        tensor = self._dequantized(name, entry) if entry.dtype in LOADED_TYPES else self._plain(entry)
        layout = self._layout(name)
        if layout.offset:
            tensor = tensor - layout.offset
        if layout.is_negative_exp:
            if not (tensor < 0).all():
                raise CheckpointError(f"{self._path}: tensor {name} holds a number that is not negative")
            tensor = torch.log(-tensor)
        return tensor if layout.num_rotated_heads is None else in_halves(tensor, layout.num_rotated_heads)

    get_slice = get_tensor

    def get_blocks(self, name: str) -> torch.Tensor:
        """Returns the blocks of a matrix, [rows, bytes] uint8, in its type of `LOADED_TYPES`.

        Raises: CheckpointError, OSError: see `get_tensor`.
        """
        entry = self._entries[name]
        if entry.dtype in REQUANTIZED_TYPES:
            blocks = torch.cat([as_q8_0(numbers) for numbers in self._numbers(name, entry)])
        else:
            blocks = self._bytes(entry.start, entry.stop).view(entry.shape[0], -1)
        num_heads = self._layout(name).num_rotated_heads
        return blocks if num_heads is None else in_halves(blocks, num_heads)

    def _plain(self, entry: TensorEntry) -> torch.Tensor:
        return self._bytes(entry.start, entry.stop).view(_DTYPES[entry.dtype]).view(entry.shape)

    def _dequantized(self, name: str, entry: TensorEntry) -> torch.Tensor:
        tensor = torch.empty(math.prod(entry.shape[:-1]), entry.shape[-1])
        first = 0
        for numbers in self._numbers(name, entry):
            tensor[first : first + len(numbers)] = numbers
            first += len(numbers)
        return tensor.view(entry.shape)

    def _numbers(self, name: str, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Yields numbers of blocks, some rows at a time."""
        num_rows, row_bytes = math.prod(entry.shape[:-1]), (entry.stop - entry.start) // math.prod(entry.shape[:-1])
        step = max(1, _NUMBERS_AT_A_TIME // entry.shape[-1])
        for first in range(0, num_rows, step):
            last = min(num_rows, first + step)
            data = self._bytes(entry.start + first * row_bytes, entry.start + last * row_bytes).view(last - first, -1)
            if entry.dtype in QUANTIZED_TYPES:
                weights = unpack(entry.dtype, data)
                is_finite = bool(weights.scales.isfinite().all() and weights.offsets.isfinite().all())
                numbers = weights.dequantized(torch.float32)
            else:
                numbers = dequantized(entry.dtype, data)
                is_finite = bool(numbers.isfinite().all())
            if not is_finite:
                raise CheckpointError(f"{self._path}: tensor {name} holds NaN or infinity")
            yield numbers

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        self._file.seek(start)
        data = bytearray(self._file.read(stop - start))
        if len(data) != stop - start:
            raise CheckpointError(f"{self._path}: ends at byte {start + len(data)}, its header requires {stop}")
        return torch.frombuffer(data, dtype=torch.uint8)


def in_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns rows [heads * size, ...] that have rotated pairs beside each other with the first of all pairs first."""
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
