"""Recording of operations as a program: the CPU's counterpart of a CUDA graph.

Steps have the same operations and differ in the number of rows only. The operations are recorded once, at the largest
number, and replayed without Python: no dispatch, allocation or lock between operations.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from kernels.cpu.huge_pages import allocate
from kernels.cpu.instruction import SHARES_PER_THREAD, WIDTH, Opcode


class Recording:
    """Instructions, and the memory they refer to.

    The number of rows of a tensor is looked up by its memory: a result has as many rows as its input. Memory of results
    that are no longer referenced is reused for later ones, as in a caching allocator.
    """

    def __init__(self, num_threads: int = 1) -> None:
        """Starts empty; num_threads is the number of threads that will run it, which decides the size of items."""
        self.num_threads = num_threads
        self.num_shares = SHARES_PER_THREAD * num_threads
        self._rows: list[list[int]] = []
        self._floats: list[float] = []
        self._row_counts: dict[int, torch.Tensor] = {}
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._kept: list[object] = []

    def add_input(self, tensor: torch.Tensor, row_count: torch.Tensor | None = None) -> None:
        """Declares an input tensor; row_count, one int64, will hold its number of rows.

        Without a row_count the tensor keeps its present number of rows.
        """
        if row_count is None:
            row_count = torch.tensor([tensor.shape[0]])
        self._row_counts[_memory(tensor)] = row_count
        self._kept.append(tensor)
        self._kept.append(row_count)

    def row_count(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the row count of a tensor: one int64 in memory."""
        if _memory(tensor) not in self._row_counts:
            self.add_input(tensor)
        return self._row_counts[_memory(tensor)]

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Returns a tensor for a result with as many rows as `like`: [rows, *shape] fp32."""
        count = like.shape[0] * int(np.prod(shape, dtype=np.int64))
        memory = self._free[count].pop() if self._free[count] else allocate(count)
        lease = memory.numpy()[:]  # its lifetime is that of the result and its views
        weakref.finalize(lease, self._free[count].append, memory)
        self._kept.append(memory)
        result = torch.from_numpy(lease).view(like.shape[0], *shape)
        self._row_counts[_memory(result)] = self.row_count(like)
        return result

    def keep(self, thing: object) -> None:
        """Keeps objects alive whose addresses are in instructions."""
        self._kept.append(thing)

    def emit(self, opcode: Opcode, rows: torch.Tensor, *operands: int, value: float = 0.0) -> None:
        """Appends an instruction on the rows of the tensor."""
        row = [int(opcode), self.row_count(rows).data_ptr(), self.num_shares, *operands]
        self._rows.append(row + [0] * (WIDTH - len(row)))
        self._floats.append(value)

    def instructions(self) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], Sequence[float]]:
        """Returns the instructions, [n, WIDTH] int64, and one fp32 operand of each."""
        return np.array(self._rows, dtype=np.int64).reshape(-1, WIDTH), self._floats


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
