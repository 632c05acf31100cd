"""Other processes, as /proc shows them; each may end at any moment, also while it is looked at."""

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.hang import HANG_S


def is_alive(pid: int) -> bool:
    """Whether it still runs. One that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, and before it was read
        return False


def wait_gone(pid: int) -> None:
    """Waits until it has ended."""
    deadline = time.monotonic() + HANG_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def kill(pid: int) -> None:
    """Kills it, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def child_pids(parent: int) -> list[int]:
    """The children of a process that runs."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def engine_pids(parent: int) -> list[int]:
    """The children of a process that are engines."""
    return [pid for pid in child_pids(parent) if b"\0engine\0" in command_line(pid)]


def command_line(pid: int) -> bytes:
    """Program and arguments, each with a NUL behind it; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
