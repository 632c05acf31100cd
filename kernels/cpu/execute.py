"""The loop in which each thread executes a program."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.cpu.adapters import adapt_item, num_adapt_items
from kernels.cpu.delta_rule import convolve_item, delta_rule_item, num_delta_items
from kernels.cpu.experts import (
    combine_item,
    expert_linear_item,
    expert_pack_item,
    num_expert_linear_items,
    num_expert_pack_items,
    route_item,
)
from kernels.cpu.gather_rows import gather_rows_item
from kernels.cpu.instruction import OPCODE, WIDTH, Opcode, item_code, num_row_items
from kernels.cpu.intrinsics import (
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    call_item,
    cycles,
    floats_at,
    longs_at,
    yield_core,
)
from kernels.cpu.jit import spliced
from kernels.cpu.linear import linear_item, num_linear_items, num_pack_items, pack_item
from kernels.cpu.paged_attention import attention_item, num_attention_items, plan_item
from kernels.cpu.pointwise import (
    add_rms_norm_item,
    add_shared_item,
    gate_columns_item,
    gate_item,
    rms_norm_item,
    soft_cap_item,
)
from kernels.cpu.rotate_and_store import rotate_and_store_item

if TYPE_CHECKING:
    from kernels.cpu.arrays import Longs

_PACK_ROWS, _LINEAR, _ADAPT, _ROUTE = map(int, (Opcode.PACK_ROWS, Opcode.LINEAR, Opcode.ADAPT, Opcode.ROUTE))
_PLAN_ATTENTION, _PAGED_ATTENTION = int(Opcode.PLAN_ATTENTION), int(Opcode.PAGED_ATTENTION)
_PACK_EXPERT_ROWS, _EXPERT_LINEAR = int(Opcode.PACK_EXPERT_ROWS), int(Opcode.EXPERT_LINEAR)
_CONVOLVE, _DELTA_RULE = int(Opcode.CONVOLVE), int(Opcode.DELTA_RULE)

ITEM_KERNELS = {
    Opcode.GATHER_ROWS: gather_rows_item,
    Opcode.RMS_NORM: rms_norm_item,
    Opcode.ADD_RMS_NORM: add_rms_norm_item,
    Opcode.PACK_ROWS: pack_item,
    Opcode.LINEAR: linear_item,
    Opcode.ROTATE_AND_STORE: rotate_and_store_item,
    Opcode.PLAN_ATTENTION: plan_item,
    Opcode.PAGED_ATTENTION: attention_item,
    Opcode.GATE: gate_item,
    Opcode.ADAPT: adapt_item,
    Opcode.SOFT_CAP: soft_cap_item,
    Opcode.ROUTE: route_item,
    Opcode.PACK_EXPERT_ROWS: expert_pack_item,
    Opcode.EXPERT_LINEAR: expert_linear_item,
    Opcode.COMBINE: combine_item,
    Opcode.GATE_COLUMNS: gate_columns_item,
    Opcode.CONVOLVE: convolve_item,
    Opcode.DELTA_RULE: delta_rule_item,
    Opcode.ADD_SHARED: add_shared_item,
}
"""What computes an item of each operation."""

_NUM_OPCODES = len(Opcode)

COUNTER_BYTES = 64
"""Counters of one thread or instruction: a cache line each, to avoid false sharing."""

_SPINS_BEFORE_YIELD = 10_000  # some 10 us: longer than any wait while all threads have a core


def compile_items(opcodes: Iterable[Opcode] = Opcode) -> "np.ndarray[Any, Any]":
    """Compiles the kernels of these operations, or loads them from the disk; returns their addresses."""
    return np.array([item_code(ITEM_KERNELS[opcode]) for opcode in opcodes], dtype=np.int64)


@spliced
def _num_items(row: "Longs") -> int:
    opcode = row[OPCODE]
    if opcode == _PACK_ROWS:
        return num_pack_items(row)
    if opcode == _LINEAR:
        return num_linear_items(row)
    if opcode in (_PLAN_ATTENTION, _ROUTE):
        return 1
    if opcode == _PAGED_ATTENTION:
        return num_attention_items(row)
    if opcode == _ADAPT:
        return num_adapt_items(row)
    if opcode == _PACK_EXPERT_ROWS:
        return num_expert_pack_items(row)
    if opcode == _EXPERT_LINEAR:
        return num_expert_linear_items(row)
    if opcode in (_CONVOLVE, _DELTA_RULE):
        return num_delta_items(row)
    return num_row_items(row)


@spliced
def wait_until(counter: int, at_least: int) -> None:
    """Spins until the counter at an address reaches a value; yields the core if that takes long."""
    spins = 0
    while atomic_load(counter) < at_least:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            yield_core()


@spliced
def take(counter: int, turn: int, begin: int, end: int) -> int:
    """Takes the next item of begin:end, those of one thread; returns -1 if there is none left.

    Args:
        counter: address of the thread's: the turn of an instruction in the upper half, its next item in the lower.
        turn: of the instruction, from 1 on.
        begin, end: the items.
    """
    item = -2
    while item == -2:
        seen = atomic_load(counter)
        seen_turn = seen >> 32
        following = seen & 0xFFFFFFFF if seen_turn == turn else begin
        if seen_turn > turn or following >= end:
            item = -1
        elif atomic_replace(counter, seen, turn << 32 | following + 1):
            item = following
    return item


@spliced
def execute(
    codes: int,
    instructions: int,
    num_instructions: int,
    values: int,
    thread: int,
    num_threads: int,
    counters: int,
    scratch: int,
) -> None:
    """Executes a program together with other threads.

    Each thread has a share of the items of an instruction, the same part of all: a row is mostly processed by one
    thread, in whose cache it is, and so are a sequence's keys and values and, with few rows, a column's weights. A
    thread that is done takes items of the others.

    Args:
        codes: address of [number of opcodes] int64, the addresses of the `ITEM_KERNELS`.
        instructions: address of [num_instructions, WIDTH] int64.
        num_instructions: how many.
        values: address of [num_instructions] fp32.
        thread: number of this thread.
        num_threads: how many threads have a share.
        counters: address of a cache line for each thread, as `take` has them, then one for each instruction: items
            done, and the time when a thread left it, in ticks of `cycles`; zeros.
        scratch: address of this thread's own memory.
    """
    table, constants = longs_at(instructions, (num_instructions, WIDTH)), floats_at(values, num_instructions)
    code_of = longs_at(codes, _NUM_OPCODES)
    for i in range(num_instructions):
        done = counters + COUNTER_BYTES * (num_threads + i)
        num_items = _num_items(table[i])
        for j in range(num_threads):
            owner = (thread + j) % num_threads
            begin, end = -(-owner * num_items // num_threads), -(-(owner + 1) * num_items // num_threads)
            if begin == end or (j > 0 and atomic_load(done) == num_items):
                continue
            counter, taken = counters + COUNTER_BYTES * owner, 0
            item = take(counter, i + 1, begin, end)
            while item >= 0:
                call_item(code_of[table[i, OPCODE]], instructions + 8 * WIDTH * i, constants[i], item, scratch)
                taken += 1
                item = take(counter, i + 1, begin, end)
            if taken > 0:
                atomic_add(done, taken)
        wait_until(done, num_items)
        atomic_store(done + 8, cycles())
