"""Instructions of a program: rows of 64-bit numbers that hold an operation, addresses and sizes.

An instruction's work is divided into items, which any thread may process in any order. The number of items may depend
on the number of rows of the step, so the instruction holds the address of that number.

Kernels call an instruction `row`, because it is one of the program's table: `row[N]` is an operand. Rows of tensors are
counted by `num_rows(row[ROWS])`.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.intrinsics import longs_at
from kernels.cpu.jit import address_of, kernel, kernel_around, spliced

if TYPE_CHECKING:
    from kernels.cpu.arrays import Longs

WIDTH = 24
"""Numbers of an instruction: OPCODE, ROWS, SHARES, and operands that each operation names for itself."""
OPCODE, ROWS, SHARES, FIRST_OPERAND = 0, 1, 2, 3

SHARES_PER_THREAD = 16
"""Items per thread of operations that can be divided anywhere. Fewer save the 50 ns of each fetch; more let the threads
finish at about the same time."""

SCRATCH_BYTES = 1 << 20
"""Scratch memory of a thread, for one item."""


class Opcode(IntEnum):
    """Operations of a program."""

    GATHER_ROWS = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    PACK_ROWS = 3
    LINEAR = 4
    ROTATE_AND_STORE = 5
    PLAN_ATTENTION = 6
    PAGED_ATTENTION = 7
    GATE = 8
    ADAPT = 9
    SOFT_CAP = 10
    ROUTE = 11
    PACK_EXPERT_ROWS = 12
    EXPERT_LINEAR = 13
    COMBINE = 14
    GATE_COLUMNS = 15
    CONVOLVE = 16
    DELTA_RULE = 17
    ADD_SHARED = 18


ItemKernel = Callable[["Longs", np.float32, int, int], None]
"""A kernel of items: takes the instruction, [WIDTH] int64, its fp32 operand, the number of the item, and the address of
the thread's scratch memory.
"""


def item_kernel(function: ItemKernel) -> Callable[[int, np.float32, int, int], None]:
    """Compiles a kernel that computes an item, with all that it calls; it takes the address of the instruction.

    Programs call it through its address, so that its code is in no other kernel, and compiled once.
    """
    spliced_function = spliced(function)

    def run(instruction: int, value: np.float32, item: int, scratch: int) -> None:
        spliced_function(longs_at(instruction, WIDTH), value, item, scratch)

    return kernel_around(run, function)


def item_code(function: Callable[[int, np.float32, int, int], None]) -> int:
    """Returns the address of the code of an `item_kernel`, for `call_item`; compiles it if it is not on the disk."""
    return address_of(function, "int64, float32, int64, int64")


@kernel
def num_rows(row_count: int) -> int:
    """Reads the number of rows at an address."""
    return int(longs_at(row_count, 1)[0])


@kernel
def num_row_items(row: "Longs") -> int:
    """Returns the number of items of an instruction on rows."""
    return min(int(row[SHARES]), num_rows(row[ROWS]))


@kernel
def first_row(item: int, row: "Longs") -> int:
    """Returns the first row of an item; it ends where the next item begins."""
    return item * num_rows(row[ROWS]) // num_row_items(row)
