"""Workers that die while they talk."""

import multiprocessing
import os
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.errors import TargetError
from loadgen.run.worker import Opened
from loadgen.run.worker_pool import WorkerHandle, WorkerPool


@pytest.fixture
def pool() -> WorkerPool:
    """One worker, killed in the middle of a message."""
    ours, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"half of it")
    theirs.close()
    process: Any = SimpleNamespace(join=lambda timeout_s: None, exitcode=-9)
    pool = WorkerPool([])
    pool.handles.append(WorkerHandle(0, process, ours))
    return pool


def test_one_that_dies_in_the_middle_of_a_message_is_dead(pool: WorkerPool) -> None:
    pool.listen(10.0)
    assert pool.handles[0].exit_code == -9
    assert not pool.is_running


def test_one_that_dies_so_before_the_start_is_named(pool: WorkerPool) -> None:
    with pytest.raises(TargetError, match="worker 0 died with exit code -9 before the start"):
        pool.replies(Opened)
