"""Threads that replay programs.

Between steps the workers block in a read of a pipe; within a step no thread blocks or takes a lock. Each thread
executes all instructions in order: it processes its share of the items, then takes items that other threads have not
begun, and continues when all are done. A descheduled thread does not delay the others, which take its items.
"""

import os
import threading
import time
import weakref
from typing import Any

import numpy as np

from kernels.cpu.execute import COUNTER_BYTES, compile_items, execute, wait_until
from kernels.cpu.instruction import SCRATCH_BYTES
from kernels.cpu.intrinsics import atomic_add, atomic_load, atomic_store, cycles, longs_at, read_bytes, write_bytes
from kernels.cpu.jit import compile_now, kernel, spliced
from kernels.cpu.recording import Recording

_IS_OPEN, _MINUS_INSIDE, _IS_OVER, _NUM_INSTRUCTIONS, _INSTRUCTIONS = range(5)
_VALUES, _COUNTERS, _STARTED, _CODES = range(5, 9)
_CONTROL_SIZE = 16


@spliced
def _take_part(control: int, thread: int, num_threads: int, scratch: int) -> None:
    """Executes the current program, if there is one."""
    atomic_add(control + 8 * _MINUS_INSIDE, -1)
    if atomic_load(control + 8 * _IS_OPEN):
        fields = longs_at(control, _CONTROL_SIZE)
        execute(
            fields[_CODES],
            fields[_INSTRUCTIONS],
            fields[_NUM_INSTRUCTIONS],
            fields[_VALUES],
            thread,
            num_threads,
            fields[_COUNTERS],
            scratch,
        )
    atomic_add(control + 8 * _MINUS_INSIDE, 1)


@kernel
def _run(control: int, thread: int, scratch: int, pipe: int, pipes: "np.ndarray[Any, Any]") -> None:
    """Takes part in programs; one kernel for both roles.

    A worker has a pipe: it waits at it for every program, and returns when the pool is closed. The calling thread has
    none (-1): it wakes the workers behind `pipes`, and returns when all threads have left the program.

    A read that a signal interrupts returns -1 and counts as a wake-up, which does nothing if no program is open. A
    worker that left would no longer empty its pipe, and a full pipe blocks the calling thread.
    """
    if pipe < 0:
        atomic_store(control + 8 * _STARTED, cycles())
        atomic_store(control + 8 * _IS_OPEN, 1)
        for i in range(pipes.shape[0]):
            write_bytes(np.int32(pipes[i]), scratch, 1)
    while pipe < 0 or (read_bytes(np.int32(pipe), scratch, 1) != 0 and not atomic_load(control + 8 * _IS_OVER)):
        _take_part(control, thread, pipes.shape[0] + 1, scratch)
        if pipe < 0:
            atomic_store(control + 8 * _IS_OPEN, 0)
            wait_until(control + 8 * _MINUS_INSIDE, 0)
            return


def compile_loop() -> None:
    """Compiles the loop of a thread, or loads it from the disk."""
    compile_now(_run, "int64, int64, int64, int64, int64[::1]")


class Program:
    """An executable recording.

    Attributes:
        recording: keeps the memory alive that the instructions refer to.
        instructions: [n, WIDTH] int64.
        fields: n, and the addresses of the instructions and of their fp32 operands: what the control block gets.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.instructions, values = recording.instructions()
        self._values = np.array(values, dtype=np.float32)
        self.fields = len(self.instructions), self.instructions.ctypes.data, self._values.ctypes.data


class WorkerPool:
    """Runs programs on the calling thread and num_threads - 1 workers. One thread may call it at a time."""

    def __init__(self, num_threads: int) -> None:
        """Starts the workers.

        Raises: ValueError: fewer than one thread.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, must be at least 1")
        self.num_threads = num_threads
        self._control = np.zeros(_CONTROL_SIZE, dtype=np.int64)
        self._counters = np.zeros(0, dtype=np.int64)
        self._first_counter = 0  # address
        self._last_s = 0.0
        self._num_runs = 0
        self._scratch = [np.zeros(SCRATCH_BYTES + 64, dtype=np.uint8) for _ in range(num_threads)]
        addresses = [memory.ctypes.data + -memory.ctypes.data % 64 for memory in self._scratch]
        pipes = [os.pipe() for _ in range(num_threads - 1)]
        self._own_scratch = addresses[0]
        self._pipes = np.array([write for _, write in pipes], dtype=np.int64)
        compile_loop()  # not in the workers, while a step waits for them
        self._codes = compile_items()
        self._control[_CODES] = self._codes.ctypes.data
        threads = []
        for number, ((read, _), scratch) in enumerate(zip(pipes, addresses[1:], strict=True), 1):
            arguments = (self._control.ctypes.data, number, scratch, read, self._pipes)
            threads.append(threading.Thread(target=_run, args=arguments, name="cpu-kernels", daemon=True))
            threads[-1].start()
        weakref.finalize(self, _end, self._control, threads, pipes, (self._scratch, self._codes))

    def run(self, program: Program) -> None:
        """Runs a program to its end."""
        self._num_runs += 1
        num_counters = (self.num_threads + program.fields[0] + 1) * COUNTER_BYTES // 8  # one more, for alignment
        if len(self._counters) < num_counters:
            self._counters = np.zeros(num_counters, dtype=np.int64)
            address = self._counters.ctypes.data
            self._first_counter = address + -address % COUNTER_BYTES
        self._counters[:num_counters] = 0
        self._control[_NUM_INSTRUCTIONS : _COUNTERS + 1] = (*program.fields, self._first_counter)
        started_s = time.perf_counter()
        _run(self._control.ctypes.data, 0, self._own_scratch, -1, self._pipes)
        self._last_s = time.perf_counter() - started_s

    def progress(self) -> tuple[int, int]:
        """Returns counters that change with every item that a thread takes; any thread may read them at any time."""
        return self._num_runs, int(self._counters.sum())

    def seconds_per_instruction(self) -> "np.ndarray[Any, Any]":
        """Returns the seconds of each instruction of the last program, from the end of the previous one: fp64."""
        numbers = COUNTER_BYTES // 8
        first = (self._first_counter - self._counters.ctypes.data) // 8 + numbers * self.num_threads
        lines = self._counters[first : first + numbers * int(self._control[_NUM_INSTRUCTIONS])]
        ticks = np.diff(lines.reshape(-1, numbers)[:, 1], prepend=self._control[_STARTED])
        return np.asarray(ticks * (self._last_s / ticks.sum()))


def _end(
    control: "np.ndarray[Any, Any]", threads: list[threading.Thread], pipes: list[tuple[int, int]], _memory: object
) -> None:
    control[_IS_OVER] = 1
    for _, write in pipes:
        os.write(write, b"\0")
    for thread in threads:
        thread.join()
    for pipe in pipes:
        for end in pipe:
            os.close(end)
