"""Reads tensors of a GGUF file, with the interface of a file that `safetensors.safe_open` opened."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.model.checkpoint_file import open_regular
from engine.model.gguf_blocks import unpack
from engine.model.gguf_file import QUANTIZED_TYPES
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

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor in its dtype, or in float32 if it is stored in blocks.

        Raises:
            CheckpointError: the file is shorter than its header says, or a scale is NaN or infinite.
            OSError: it cannot be read.
        """
        entry = self._entries[name]
        tensor = self._dequantized(name, entry) if entry.dtype in QUANTIZED_TYPES else self._plain(entry)
        num_heads, offset = self._layout(name)
        if offset:
            tensor = tensor - offset
        return tensor if num_heads is None else in_halves(tensor, num_heads)

    get_slice = get_tensor

    def get_blocks(self, name: str) -> torch.Tensor:
        """Returns the blocks of a matrix, [rows, bytes] uint8.

        Raises: CheckpointError, OSError: see `get_tensor`.
        """
        entry = self._entries[name]
        blocks = self._bytes(entry.start, entry.stop).view(entry.shape[0], -1)
        num_heads, _ = self._layout(name)
        return blocks if num_heads is None else in_halves(blocks, num_heads)

    def _plain(self, entry: TensorEntry) -> torch.Tensor:
        return self._bytes(entry.start, entry.stop).view(_DTYPES[entry.dtype]).view(entry.shape)

    def _dequantized(self, name: str, entry: TensorEntry) -> torch.Tensor:
        num_rows, row_bytes = math.prod(entry.shape[:-1]), (entry.stop - entry.start) // math.prod(entry.shape[:-1])
        tensor = torch.empty(num_rows, entry.shape[-1])
        step = max(1, _NUMBERS_AT_A_TIME // entry.shape[-1])
        for first in range(0, num_rows, step):
            last = min(num_rows, first + step)
            data = self._bytes(entry.start + first * row_bytes, entry.start + last * row_bytes)
            weights = unpack(entry.dtype, data.view(last - first, row_bytes))
            if not (weights.scales.isfinite().all() and weights.offsets.isfinite().all()):
                raise CheckpointError(f"{self._path}: tensor {name} holds NaN or infinity")
            tensor[first:last] = weights.dequantized(torch.float32)
        return tensor.view(entry.shape)

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        self._file.seek(start)
        data = bytearray(self._file.read(stop - start))
        if len(data) != stop - start:
            raise CheckpointError(f"{self._path}: ends at byte {start + len(data)}, its header requires {stop}")
        return torch.frombuffer(data, dtype=torch.uint8)

    def __del__(self) -> None:
        self._file.close()


def in_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns rows [heads * size, ...] that have rotated pairs beside each other with the first of all pairs first."""
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
