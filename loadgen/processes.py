"""Server processes: started with a log, weighed by their CPU time, awaited and stopped with everything they started."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from loadgen.errors import TargetError

_LOG_LINES = 12
_POLL_S = 0.05
_CPUCLOCK_SCHED = 2


class Process:
    """A program in a session of its own: Ctrl-C reaches only us, and `stop` ends all its children.

    Attributes:
        name: in error messages.
        pid: process id.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        *,
        name: str = "",
        env: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        stop_timeout_s: float = 20.0,
        holds_stdin: bool = False,
    ) -> None:
        """Starts it.

        Args:
            command: program and arguments.
            log: file for stdout and stderr.
            name: in error messages; empty is the program's own name.
            env: environment.
            cwd: working directory; None is ours.
            stop_signal: asks it to stop.
            stop_timeout_s: time to stop before it is killed.
            holds_stdin: its stdin is a pipe that closes when we end, even by SIGKILL; otherwise it is empty.
        Raises: OSError: it cannot be started.
        """
        self.name = name or str(command[0])
        self._log = log
        self._stop_signal = stop_signal
        self._stop_timeout_s = stop_timeout_s
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE if holds_stdin else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def cpu_s(self) -> float:
        """CPU seconds used so far, all threads."""
        return cpu_s(self.pid)

    def children(self) -> list[int]:
        """Process ids of its direct children."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def last_lines(self) -> str:
        """End of its output."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-_LOG_LINES:]) or "(no output)"

    def stop(self) -> None:
        """Asks it to stop; then kills its whole session, so that nothing of it runs beside the next measurement."""
        if self.exit_status is None:
            self._popen.send_signal(self._stop_signal)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(self._stop_timeout_s)
        self.kill()

    def kill(self) -> None:
        """Ends it and its session by SIGKILL."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()


def start_module(module: str, arguments: Sequence[str | Path], log: Path) -> Process:
    """Starts `python -m module`, without the user's CHAIRLIFT_* settings.

    Args:
        module: as after `python -m`.
        arguments: command line.
        log: file for its output.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_")}
    return Process([sys.executable, "-m", module, *arguments], log, name=module, env=env, holds_stdin=True)


def wait_until(is_ready: Callable[[], bool], processes: Sequence[Process], timeout_s: float) -> None:
    """Waits for servers to become ready.

    Raises: TargetError: a process has ended or the time is over; with the last lines of its output.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_ready():
        for process in processes:
            if (status := process.exit_status) is not None:
                raise TargetError(f"{process.name} ended with status {status} while starting: {_one_line(process)}")
        if time.monotonic() > deadline_s:
            last = "; ".join(map(_one_line, processes))
            raise TargetError(f"{processes[0].name} is not ready after {timeout_s:g} s: {last}")
        time.sleep(_POLL_S)


def _one_line(process: Process) -> str:
    return process.last_lines().replace("\n", " | ")


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 on which nothing listens; the system assigns it to no other process inside the block.

    A server can still listen there if it sets SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads together, including those that have ended.

    Raises: OSError: there is no such process.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)  # as clock_getcpuclockid(3) makes it on Linux
