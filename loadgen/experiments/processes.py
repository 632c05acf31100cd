"""Processes of a benchmark: started with a log of their own, weighed by their CPU time, and stopped again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_STOP_TIMEOUT_S = 20.0
_LOG_LINES = 15
_CPUCLOCK_SCHED = 2


class Process:
    """A Python module as a process. Its stdin is a pipe that closes when we end, however we end.

    Attributes:
        name: the module.
    """

    def __init__(
        self, module: str, arguments: Sequence[str | Path], log: Path, *, python_path: Sequence[Path] = ()
    ) -> None:
        """Starts it.

        Args:
            module: as after `python -m`.
            arguments: the command line.
            log: file for what it prints.
            python_path: put in front of its module path.
        """
        self.name = module
        self._log = log
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_")}
        if python_path:
            inherited = environ.get("PYTHONPATH")
            environ["PYTHONPATH"] = os.pathsep.join([*map(str, python_path), *([inherited] if inherited else [])])
        with log.open("w") as out:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
            )

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._popen.poll() is not None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def cpu_s(self) -> float:
        """CPU seconds used so far, all threads."""
        return cpu_s(self.pid)

    def last_lines(self) -> str:
        """The end of what it has printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def stop(self) -> None:
        """Asks it to end, and kills it if it does not."""
        self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self._leave()

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        self._popen.kill()
        self._leave()

    def _leave(self) -> None:
        self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads together, those that have ended too; to the nanosecond.

    Raises: OSError: there is no such process.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)  # as clock_getcpuclockid(3) makes it on Linux
