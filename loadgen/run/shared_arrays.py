"""Arrays in shared memory: workers write into them during a run, and the controller reads them.

There are no locks. Every row has one writer, and a read during the run may see a row that is half written; results are
read after all workers have ended.
"""

import ctypes
import multiprocessing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROGRESS = np.dtype([("num_chunks", "i8"), ("chunks_lost", "i8")])
"""Number of messages in one worker's log."""


@dataclass(frozen=True, slots=True)
class SharedArray:
    """Rows of one dtype in memory that spawned processes share. Pass it to a process only when it is started.

    Attributes:
        buffer: the memory; it is freed with the last process that has it, even if that is killed.
        dtype: of a row.
        count: rows.
    """

    buffer: Any
    dtype: np.dtype[Any]
    count: int

    @staticmethod
    def new(count: int, dtype: np.dtype[Any]) -> "SharedArray":
        """Returns `count` rows of zeros."""
        size = max(count, 1) * dtype.itemsize
        return SharedArray(multiprocessing.get_context("spawn").RawArray(ctypes.c_char, size), dtype, count)

    def rows(self) -> NDArray[Any]:
        """Returns a view of the rows, [count] of dtype; the same memory in every process."""
        return np.frombuffer(self.buffer, dtype=self.dtype)[: self.count]
