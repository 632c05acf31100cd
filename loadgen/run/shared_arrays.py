"""Arrays that several processes see: workers write into them while a run is on, the controller looks.

No locks: every row has one writer, and a look may catch a row half written; what counts is read when all are done.
"""

import ctypes
import multiprocessing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROGRESS = np.dtype([("num_chunks", "i8"), ("chunks_lost", "i8")])
"""How far one worker's log of messages has come."""


@dataclass(frozen=True, slots=True)
class SharedArray:
    """Rows of one dtype in memory that spawned processes shard. To be handed to a process when it is started, only.

    Attributes:
        buffer: the memory; it goes with the last process that has it, even if that is killed.
        dtype: of a row.
        count: rows.
    """

    buffer: Any
    dtype: np.dtype[Any]
    count: int

    @staticmethod
    def new(count: int, dtype: np.dtype[Any]) -> "SharedArray":
        """`count` rows of zeros."""
        size = max(count, 1) * dtype.itemsize
        return SharedArray(multiprocessing.get_context("spawn").RawArray(ctypes.c_char, size), dtype, count)

    def rows(self) -> NDArray[Any]:
        """[count] of dtype: a view, the same memory in every process."""
        return np.frombuffer(self.buffer, dtype=self.dtype)[: self.count]
