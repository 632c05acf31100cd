"""What a program is made of: rows of 64-bit numbers that name an operation, addresses and sizes.

An instruction's work is cut into items, which any thread may do in any order. How many there are may depend on how many
rows the step has: that number lies in memory, and the instruction holds its address.
"""

from enum import IntEnum
from typing import TYPE_CHECKING

from kernels.cpu.intrinsics import longs_at
from kernels.cpu.jit import kernel

if TYPE_CHECKING:
    from kernels.cpu.arrays import Longs

WIDTH = 24
"""Numbers of an instruction: OPCODE, ROWS, SHARES, and operands that each operation names for itself."""
OPCODE, ROWS, SHARES, FIRST_OPERAND = 0, 1, 2, 3

SHARES_PER_THREAD = 16
"""Into how many items, per thread, operations are cut that can be cut anywhere: few, because fetching one costs 50 ns;
many, for the threads to end at about the same time."""

SCRATCH_BYTES = 1 << 20
"""Memory a thread has for one item."""


class Opcode(IntEnum):
    """Operations a program may hold."""

    GATHER_ROWS = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    PACK_ROWS = 3
    LINEAR = 4
    ROTATE_AND_STORE = 5
    PLAN_ATTENTION = 6
    PAGED_ATTENTION = 7
    SILU_AND_MUL = 8


@kernel
def num_rows(row_count: int) -> int:
    """The number of rows that lies at an address."""
    return int(longs_at(row_count, 1)[0])


@kernel
def num_row_items(row: "Longs") -> int:
    """Into how many items the rows of an instruction are cut."""
    return min(int(row[SHARES]), num_rows(row[ROWS]))


@kernel
def first_row(item: int, row: "Longs") -> int:
    """Where an item's rows begin; it ends where the next begins."""
    return item * num_rows(row[ROWS]) // num_row_items(row)
