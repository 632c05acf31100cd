"""The loop in which each thread executes a program."""

from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.adapters import adapt_item, num_adapt_items
from kernels.cpu.experts import (
    combine_item,
    expert_linear_item,
    expert_pack_item,
    num_expert_linear_items,
    num_expert_pack_items,
    route_item,
)
from kernels.cpu.gather_rows import gather_rows_item
from kernels.cpu.instruction import OPCODE, WIDTH, Opcode, num_row_items
from kernels.cpu.intrinsics import atomic_add, atomic_load, atomic_store, cycles, floats_at, longs_at, yield_core
from kernels.cpu.jit import spliced
from kernels.cpu.linear import linear_item, num_linear_items, num_pack_items, pack_item
from kernels.cpu.paged_attention import attention_item, num_attention_items, plan_item
from kernels.cpu.pointwise import (
    add_rms_norm_item,
    clamped_gate_item,
    gelu_and_mul_item,
    rms_norm_item,
    silu_and_mul_item,
    soft_cap_item,
)
from kernels.cpu.rotate_and_store import rotate_and_store_item

if TYPE_CHECKING:
    from kernels.cpu.arrays import Longs

_GATHER_ROWS, _RMS_NORM, _ADD_RMS_NORM = int(Opcode.GATHER_ROWS), int(Opcode.RMS_NORM), int(Opcode.ADD_RMS_NORM)
_PACK_ROWS, _LINEAR, _ROTATE_AND_STORE = int(Opcode.PACK_ROWS), int(Opcode.LINEAR), int(Opcode.ROTATE_AND_STORE)
_PLAN_ATTENTION, _PAGED_ATTENTION = int(Opcode.PLAN_ATTENTION), int(Opcode.PAGED_ATTENTION)
_GELU_AND_MUL, _ADAPT, _SOFT_CAP = int(Opcode.GELU_AND_MUL), int(Opcode.ADAPT), int(Opcode.SOFT_CAP)
_ROUTE, _PACK_EXPERT_ROWS = int(Opcode.ROUTE), int(Opcode.PACK_EXPERT_ROWS)
_EXPERT_LINEAR, _COMBINE = int(Opcode.EXPERT_LINEAR), int(Opcode.COMBINE)
_CLAMPED_GATE = int(Opcode.CLAMPED_GATE)

COUNTER_BYTES = 64
"""Counters of one instruction: a cache line each, to avoid false sharing between instructions."""

_SPINS_BEFORE_YIELD = 10_000  # some 10 us: longer than any wait while all threads have a core


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
    return num_row_items(row)


@spliced
def _run_item(row: "Longs", value: np.float32, item: int, scratch: int) -> None:
    opcode = row[OPCODE]
    if opcode == _LINEAR:
        linear_item(row, item, scratch)
    elif opcode == _PACK_ROWS:
        pack_item(row, item, scratch)
    elif opcode == _PAGED_ATTENTION:
        attention_item(row, value, item, scratch)
    elif opcode == _ROTATE_AND_STORE:
        rotate_and_store_item(row, value, item)
    elif opcode == _ADD_RMS_NORM:
        add_rms_norm_item(row, value, item)
    elif opcode == _RMS_NORM:
        rms_norm_item(row, value, item)
    elif opcode == _GATHER_ROWS:
        gather_rows_item(row, item, scratch)
    elif opcode == _PLAN_ATTENTION:
        plan_item(row)
    elif opcode == _GELU_AND_MUL:
        gelu_and_mul_item(row, item)
    elif opcode == _ADAPT:
        adapt_item(row, item, scratch)
    elif opcode == _SOFT_CAP:
        soft_cap_item(row, value, item)
    elif opcode == _EXPERT_LINEAR:
        expert_linear_item(row, item, scratch)
    elif opcode == _PACK_EXPERT_ROWS:
        expert_pack_item(row, item, scratch)
    elif opcode == _ROUTE:
        route_item(row)
    elif opcode == _COMBINE:
        combine_item(row, item)
    elif opcode == _CLAMPED_GATE:
        clamped_gate_item(row, value, item)
    else:
        silu_and_mul_item(row, item)


@spliced
def wait_until(counter: int, at_least: int) -> None:
    """Spins until the counter at an address reaches a value; yields the core if that takes long."""
    spins = 0
    while atomic_load(counter) < at_least:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            yield_core()


@spliced
def execute(instructions: int, num_instructions: int, values: int, counters: int, scratch: int) -> None:
    """Executes a program together with any number of other threads.

    Args:
        instructions: address of [num_instructions, WIDTH] int64.
        num_instructions: how many.
        values: address of [num_instructions] fp32.
        counters: address of a cache line for each instruction, zeros: items fetched, items done, and the time when a
            thread left it, in ticks of `cycles`.
        scratch: address of this thread's own memory.
    """
    table, constants = longs_at(instructions, (num_instructions, WIDTH)), floats_at(values, num_instructions)
    for i in range(num_instructions):
        fetched, done = counters + COUNTER_BYTES * i, counters + COUNTER_BYTES * i + 8
        num_items = _num_items(table[i])
        item = atomic_add(fetched, 1)
        while item < num_items:
            _run_item(table[i], constants[i], item, scratch)
            atomic_add(done, 1)
            item = atomic_add(fetched, 1)
        wait_until(done, num_items)
        atomic_store(done + 8, cycles())
