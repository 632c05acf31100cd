"""Worker pools: programs give the same results with any number of threads, and no thread outlives its pool."""

import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import defaultdict
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core.event import install_recorder

from kernels.cpu import worker_pool
from kernels.cpu.execute import take
from kernels.cpu.pointwise import emit_add_rms_norm, emit_gate_and_mul
from kernels.cpu.recording import Recording
from kernels.cpu.worker_pool import Program, WorkerPool
from tests.hang import HANG_S

NUM_THREADS = pytest.mark.parametrize("num_threads", [1, 2, 5])


class Sum:
    """A program in which each instruction needs the result of the one before: x is added to a total many times."""

    def __init__(self, num_rows, num_times):
        recording = Recording()
        self.num_times = num_times
        self.total = torch.zeros(num_rows, 8)
        x, weight = torch.arange(8.0 * num_rows).view(num_rows, 8), torch.ones(8)
        for _ in range(num_times):
            emit_add_rms_norm(recording, x, self.total, weight, 1.0)
        self.x = x
        self.program = Program(recording)

    def run(self, pool):
        self.total.zero_()
        pool.run(self.program)
        assert torch.equal(self.total, self.num_times * self.x)


def workers():
    return {thread for thread in threading.enumerate() if thread.name == "cpu-kernels"}


class RecordedPipes:
    """Replaces the os module for a pool and records its pipes by inode, because file descriptors are reused."""

    write, close = staticmethod(os.write), staticmethod(os.close)

    def __init__(self):
        self.made = set()

    def pipe(self):
        ends = os.pipe()
        self.made |= {Path(f"/proc/self/fd/{end}").readlink() for end in ends}
        return ends


def has_read_all(pool):
    """Whether the workers have read every byte that was to wake them."""
    return all(ioctl(pipe, termios.FIONREAD, bytes(4)) == bytes(4) for pipe in pool._pipes.tolist())


def open_files():
    """Yields the targets of this process's descriptors, without those that other threads close meanwhile."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            yield file.readlink()


@pytest.fixture(autouse=True)
def new_workers(monkeypatch):
    """new_workers() -> the number of workers started in this test and still alive. The test must end with none of them.

    A pool is in no reference cycle, so its threads and pipes are gone with its last reference, without the garbage
    collector.
    """
    before = workers()
    pipes = RecordedPipes()
    monkeypatch.setattr(worker_pool, "os", pipes)

    def count():
        return len(workers() - before)

    yield count
    assert count() == 0
    assert not pipes.made & set(open_files())


@pytest.mark.sampled(2)
@NUM_THREADS
def test_programs_run_to_their_end_every_time(num_threads):
    """Each instruction begins when the one before is done, whichever thread does the work."""
    pool = WorkerPool(num_threads)
    for program in (Sum(100, 50), Sum(1, 50), Sum(33, 1)):
        for _ in range(50):
            program.run(pool)


@pytest.mark.sampled(2)
@NUM_THREADS
def test_programs_take_turns_on_one_pool(num_threads):
    """A longer one after a shorter one needs more counters; an empty one needs none."""
    pool, empty = WorkerPool(num_threads), Program(Recording())
    programs = [Sum(10, 3), Sum(40, 200), Sum(2, 1)]
    for _ in range(20):
        for program in programs:
            program.run(pool)
            pool.run(empty)


@pytest.fixture
def interrupt():
    """interrupt(thread): sends it a signal, and returns when the handler in C has run on it.

    The handler in Python runs on the main thread, which may notice late that a signal came to another thread.
    """
    seen, written = os.pipe()
    os.set_blocking(written, False)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    descriptor = signal.set_wakeup_fd(written)

    def send(thread):
        signal.pthread_kill(thread.ident, signal.SIGUSR1)
        assert select.select([seen], [], [], HANG_S)[0], "no handler has run"
        os.read(seen, 1)

    yield send
    signal.set_wakeup_fd(descriptor)
    signal.signal(signal.SIGUSR1, handler)
    for end in (seen, written):
        os.close(end)


def test_a_signal_ends_no_worker(new_workers, interrupt):
    """A handler interrupts the read in which a worker waits; without a reader its pipe would fill up."""
    known = workers()
    pool, work = WorkerPool(2), Sum(33, 20)
    (worker,) = workers() - known
    for _ in range(5):
        interrupt(worker)
        work.run(pool)
        deadline_s = time.monotonic() + HANG_S
        while not has_read_all(pool):
            assert time.monotonic() < deadline_s, "the worker has left its pipe"
    assert new_workers() == 1


def test_a_thread_that_does_not_come_delays_nobody():
    """The calling thread processes the share of a worker that is not woken."""
    pool, work = WorkerPool(2), Sum(33, 20)
    reader, writer = os.pipe()
    pipes = pool._pipes.copy()
    pool._pipes[:] = writer
    caller = threading.Thread(target=work.run, args=[pool], daemon=True)
    caller.start()
    caller.join(HANG_S)
    assert not caller.is_alive()
    pool._pipes[:] = pipes
    work.run(pool)
    for end in (reader, writer):
        os.close(end)


def test_items_of_a_share_are_taken_once_in_each_turn():
    counter = np.zeros(1, dtype=np.int64)

    def taken(turn, begin, end, limit=10):
        items = [take(counter.ctypes.data, turn, begin, end) for _ in range(limit)]
        return items[: items.index(-1)] if -1 in items else items

    assert taken(1, 3, 6) == [3, 4, 5]
    assert taken(1, 3, 6) == []
    assert taken(2, 0, 0) == []
    assert taken(3, 3, 6, limit=2) == [3, 4]
    assert taken(2, 3, 6) == []  # a thread that is late
    assert taken(3, 3, 6) == [5]


def test_one_program_runs_on_several_pools():
    program, pools = Sum(64, 20), [WorkerPool(num_threads) for num_threads in (1, 2, 3)]
    for _ in range(20):
        for pool in pools:
            program.run(pool)


def test_workers_end_with_the_last_reference_to_their_pool(new_workers):
    pools = [WorkerPool(3) for _ in range(4)]
    assert new_workers() == 8
    Sum(5, 2).run(pools[3])
    del pools[::2]
    assert new_workers() == 4
    for pool in pools:
        Sum(5, 2).run(pool)
    del pools, pool
    assert new_workers() == 0


def test_workers_of_an_unused_pool_end(new_workers):
    pool = WorkerPool(4)
    assert new_workers() == 3
    del pool
    assert new_workers() == 0


def test_pools_are_independent():
    """Each pool is called from its own thread, at the same time."""
    failures = []

    def serve():
        try:
            pool, program = WorkerPool(2), Sum(50, 20)
            for _ in range(30):
                program.run(pool)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.sampled(2)
@NUM_THREADS
def test_progress_is_seen_within_a_program(num_threads):
    """Programs run until another thread has read five different values of the progress within one of them."""
    pool, work = WorkerPool(num_threads), Sum(512, 500)
    seen = defaultdict(set)
    over = threading.Event()

    def run():
        while not over.is_set():
            pool.run(work.program)

    runner = threading.Thread(target=run)
    runner.start()
    while max(map(len, seen.values()), default=0) < 5:
        run_number, done = pool.progress()
        seen[run_number].add(done)
    over.set()
    runner.join()
    assert pool.progress() == pool.progress()  # nothing runs


def test_rows_are_counted_when_a_program_runs():
    """The number of rows is read at each run, not at recording."""
    recording, num_rows = Recording(), torch.tensor([0])
    gate_up = torch.ones(100, 16)
    recording.add_input(gate_up, num_rows)
    out = emit_gate_and_mul(recording, gate_up, "silu_and_mul")
    program, pool = Program(recording), WorkerPool(2)
    for count in (100, 0, 1, 31, 32, 33, 99):
        out.fill_(torch.nan)
        num_rows[0] = count
        pool.run(program)
        assert out[:count].isfinite().all()
        assert out[count:].isnan().all()


def test_pool_compiles_nothing_after_its_start():
    """A compile would delay the first step."""
    pool, kernels = WorkerPool(2), [value for value in vars(worker_pool).values() if hasattr(value, "signatures")]
    before = [len(kernel.signatures) for kernel in kernels]
    assert sum(before) >= 1
    with install_recorder("numba:compile") as compilations:
        for num_threads in (1, 2):
            Sum(20, 3).run(WorkerPool(num_threads))
        Sum(20, 3).run(pool)
    assert not compilations.buffer
    assert [len(kernel.signatures) for kernel in kernels] == before


@pytest.mark.parametrize("num_threads", [0, -1])
def test_fewer_than_one_thread_is_rejected(num_threads):
    with pytest.raises(ValueError, match=f"num_threads is {num_threads}, must be at least 1"):
        WorkerPool(num_threads)


@pytest.mark.slow
def test_process_exits_with_an_open_pool():
    code = "from kernels.cpu.worker_pool import WorkerPool; pool = WorkerPool(3); print('made')"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert result.stdout == "made\n"
