"""Servers whose engines can be killed: two behind one frontend, and one under `chairlift up`, which starts it again."""

import os
import signal
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from chairlift.bench.benchmark import BenchmarkError
from loadgen.experiments.held_port import held_port
from loadgen.experiments.processes import Process

_START_TIMEOUT_S = 300.0
_POLL_S = 0.02
_UP = "chairlift:engine_up{"


class Mortal(Protocol):
    """A server for the length of a `with` block.

    Attributes:
        target: its gRPC port.
        num_engines: that it has when all are there.
    """

    target: str
    num_engines: int

    def __enter__(self) -> Self:
        """Starts it."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops it."""
        ...

    def kill(self) -> float:
        """Ends one of its engines by SIGKILL -> time.monotonic() just before."""
        ...

    def wait_whole(self) -> None:
        """Waits until all engines are attached."""
        ...


class _Server(ABC):
    """What the two have in common."""

    num_engines = 1

    def __init__(self, folder: Path, engine_flags: Sequence[str]) -> None:
        """Prepares; the `with` block starts.

        Args:
            folder: for logs and sockets, to be made; its path must be short.
            engine_flags: of every engine, without an address.
        """
        self._folder = folder
        self._engine_flags = engine_flags
        self._processes: list[Process] = []
        self._held_ports = ExitStack()
        self._port, self._http_port = (self._held_ports.enter_context(held_port()) for _ in range(2))
        self.target = f"127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        self._start_all()
        self.wait_whole()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.stop()
        self._held_ports.close()

    def wait_whole(self) -> None:
        """See Mortal.

        Raises: BenchmarkError: it does not come to that.
        """
        self._wait(lambda: self._num_attached() == self.num_engines)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not condition():
            for process in self._processes:
                if process.has_ended:
                    raise BenchmarkError(f"{process.name} has ended:\n{process.last_lines()}")
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"not ready after {_START_TIMEOUT_S:g} s:\n{self._processes[-1].last_lines()}")
            time.sleep(_POLL_S)

    def _num_attached(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/metrics", timeout=5) as response:
                text: str = response.read().decode()
        except (urllib.error.URLError, OSError):
            return 0
        return sum(line.startswith(_UP) and line.endswith(" 1.0") for line in text.splitlines())

    @abstractmethod
    def _start_all(self) -> None:
        """Starts its processes, which `_processes` holds from then on."""


class TwoEngines(_Server):
    """Two engines, each with half of the threads, behind one frontend. The one that is killed is started again."""

    num_engines = 2

    def _start_all(self) -> None:
        self._sockets = [self._folder / f"{index}.sock" for index in range(self.num_engines)]
        self._engines = [self._start_engine(index) for index in range(self.num_engines)]
        addresses = [flag for path in self._sockets for flag in ("--engine", f"unix:{path}")]
        ports = ("--port", str(self._port), "--http-port", str(self._http_port))
        self._processes.append(Process("frontend", [*addresses, *ports], self._folder / "frontend.log"))
        self._next = 0

    def kill(self) -> float:
        """See Mortal. They take turns."""
        index, self._next = self._next, 1 - self._next
        killed_at_s = time.monotonic()
        self._processes.remove(self._engines[index])
        self._engines[index].kill()
        self._engines[index] = self._start_engine(index)
        return killed_at_s

    def _start_engine(self, index: int) -> Process:
        flags = [*self._engine_flags, "--uds", str(self._sockets[index]), "--exit-on-stdin-close"]
        process = Process("engine", flags, self._folder / f"engine-{index}.log")
        self._processes.insert(0, process)
        return process


class UnderUp(_Server):
    """One engine under `chairlift up`, which starts it again by itself."""

    def _start_all(self) -> None:
        ports = ("--port", str(self._port), "--http-port", str(self._http_port))
        self._processes.append(
            Process("frontend.cli.main", ["up", *ports, *self._engine_flags], self._folder / "up.log")
        )

    def kill(self) -> float:
        """See Mortal."""
        up = self._processes[0].pid
        children = Path(f"/proc/{up}/task/{up}/children").read_text().split()
        engines = [int(pid) for pid in children if b"\0engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if len(engines) != 1:
            raise BenchmarkError(f"{len(engines)} engines under chairlift up")
        killed_at_s = time.monotonic()
        os.kill(engines[0], signal.SIGKILL)
        return killed_at_s
