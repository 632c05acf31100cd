"""Recording of operations as a program: the CPU's counterpart of a CUDA graph.

A step's operations are the same every time, but for the number of rows. So they are recorded once, at the largest
number, and then replayed without Python: no dispatch, no allocation, no lock between one operation and the next.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from kernels.cpu.instruction import SHARES_PER_THREAD, WIDTH, Opcode


class Recording:
    """Instructions, and the memory they refer to.

    How many rows a tensor has is known by the memory it lies in: a result has as many as what it was made from. Memory
    of results that nobody holds any longer is given to later ones, as a caching allocator does.
    """

    def __init__(self, num_threads: int = 1) -> None:
        """Starts empty; num_threads is how many will run it, which decides how finely work is cut."""
        self._shares = SHARES_PER_THREAD * num_threads
        self._rows: list[list[int]] = []
        self._floats: list[float] = []
        self._row_counts: dict[int, torch.Tensor] = {}
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._kept: list[object] = []

    def add_input(self, tensor: torch.Tensor, row_count: torch.Tensor | None = None) -> None:
        """Declares a tensor the program reads: row_count, one int64, will tell how many rows of it there are.

        Without one there are always as many as the tensor has now.
        """
        if row_count is None:
            row_count = torch.tensor([tensor.shape[0]])
        self._row_counts[_memory(tensor)] = row_count
        self._kept.append(tensor)
        self._kept.append(row_count)

    def row_count(self, tensor: torch.Tensor) -> torch.Tensor:
        """The number of rows of a tensor, in memory: one int64."""
        if _memory(tensor) not in self._row_counts:
            self.add_input(tensor)
        return self._row_counts[_memory(tensor)]

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """A tensor for a result with as many rows as `like`: [rows, *shape] fp32."""
        count = like.shape[0] * int(np.prod(shape, dtype=np.int64))
        memory = self._free[count].pop() if self._free[count] else torch.empty(count)
        lease = memory.numpy()[:]  # its life tells how long the result and its views are in use
        weakref.finalize(lease, self._free[count].append, memory)
        self._kept.append(memory)
        result = torch.from_numpy(lease).view(like.shape[0], *shape)
        self._row_counts[_memory(result)] = self.row_count(like)
        return result

    def keep(self, thing: object) -> None:
        """Keeps alive what instructions have addresses of."""
        self._kept.append(thing)

    def emit(self, opcode: Opcode, rows: torch.Tensor, *operands: int, value: float = 0.0) -> None:
        """Appends an instruction on as many rows as the tensor has."""
        row = [int(opcode), self.row_count(rows).data_ptr(), self._shares, *operands]
        self._rows.append(row + [0] * (WIDTH - len(row)))
        self._floats.append(value)

    def instructions(self) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int64]], Sequence[float]]:
        """[n, WIDTH] int64, and one fp32 operand of each."""
        return np.array(self._rows, dtype=np.int64).reshape(-1, WIDTH), self._floats


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
