"""Helpers to keep a child process running: pauses between restarts, descriptions of its end, and ending it."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

LONGEST_PAUSE_S = 30.0
STABLE_AFTER_S = 60.0


class RestartPauses:
    """Pauses before restarts of a process (exponential backoff): each is twice as long as the one before.

    Args:
        first_s: the first pause.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._next_s = first_s

    def next_s(self, ran_s: float) -> float:
        """Returns the next pause after a process that ran for `ran_s`; a minute or more resets the pauses."""
        if ran_s >= STABLE_AFTER_S:
            self._next_s = self._first_s
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s


def describe_end(status: int) -> str:
    """Describes a return code of `subprocess`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no names
        return f"killed by signal {-status}"


def terminate(process: asyncio.subprocess.Process) -> None:
    """Sends SIGTERM to a process, unless it has ended.

    `Process.terminate` polls the child first. If the child has just ended, the poll reaps it before asyncio does, and
    asyncio reports exit status 255 instead of the true one (python/cpython#127049).
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


def kill_group(leader: int) -> None:
    """Kills a process that leads a session, and its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def num_oom_kills() -> int:
    """Returns the number of processes killed for lack of memory since boot, in all cgroups; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
