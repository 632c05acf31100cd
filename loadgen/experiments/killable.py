"""Servers whose engines can be killed: two engines behind one frontend, and one engine that `chairlift up` restarts."""

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from loadgen.direct_http import direct_opener
from loadgen.errors import TargetError
from loadgen.processes import Process, held_port, start_module, wait_until

_START_TIMEOUT_S = 600.0  # the engine may compile all CPU kernels first, on a busy machine
_UP = "chairlift:engine_up{"


class KillableServer(ABC):
    """A server for the length of a `with` block.

    Attributes:
        target: its gRPC endpoint.
        num_engines: attached engines of a complete server.
    """

    num_engines = 1

    def __init__(self, folder: Path, engine_flags: Sequence[str]) -> None:
        """Prepares the server.

        Args:
            folder: for logs and sockets, created here; its path must be short.
            engine_flags: command line of every engine, without an address.
        """
        self._folder = folder
        self._engine_flags = engine_flags
        self._processes: list[Process] = []
        self._held_ports = ExitStack()
        port, self._http_port = (self._held_ports.enter_context(held_port()) for _ in range(2))
        self._ports = ("--port", str(port), "--http-port", str(self._http_port))
        self.target = f"127.0.0.1:{port}"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        try:
            self._start_all()
            self.wait_complete()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.stop()
        self._held_ports.close()

    @abstractmethod
    def kill(self) -> float:
        """Ends one engine by SIGKILL; returns time.monotonic() just before."""

    def wait_complete(self) -> None:
        """Waits until all engines are attached; raises TargetError if a process ends or takes too long."""
        wait_until(lambda: self._num_attached() == self.num_engines, self._processes, _START_TIMEOUT_S)

    @abstractmethod
    def _start_all(self) -> None:
        """Starts all processes and keeps them in `_processes`."""

    def _num_attached(self) -> int:
        try:
            with direct_opener().open(f"http://127.0.0.1:{self._http_port}/metrics", timeout=5) as response:
                text: str = response.read().decode()
        except OSError:
            return 0
        return sum(line.startswith(_UP) and line.endswith(" 1.0") for line in text.splitlines())


class TwoEngines(KillableServer):
    """Two engines behind one frontend, killed in turn. The one that is killed is started again."""

    num_engines = 2

    def _start_all(self) -> None:
        self._sockets = [self._folder / f"{index}.sock" for index in range(self.num_engines)]
        self._engines = [self._start_engine(index) for index in range(self.num_engines)]
        addresses = [flag for path in self._sockets for flag in ("--engine", f"unix:{path}")]
        self._processes.append(start_module("frontend", [*addresses, *self._ports], self._folder / "frontend.log"))
        self._next = 0

    def kill(self) -> float:
        """See KillableServer."""
        index, self._next = self._next, 1 - self._next
        killed_at_s = time.monotonic()
        self._processes.remove(self._engines[index])
        self._engines[index].kill()
        self._engines[index] = self._start_engine(index)
        return killed_at_s

    def _start_engine(self, index: int) -> Process:
        flags = [*self._engine_flags, "--uds", str(self._sockets[index]), "--exit-on-stdin-close"]
        process = start_module("engine", flags, self._folder / f"engine-{index}.log")
        self._processes.insert(0, process)
        return process


class UnderUp(KillableServer):
    """One engine under `chairlift up`, which restarts it."""

    def _start_all(self) -> None:
        arguments = ["up", *self._ports, *self._engine_flags]
        self._processes.append(start_module("frontend.cli.main", arguments, self._folder / "up.log"))

    def kill(self) -> float:
        """See KillableServer."""
        children = self._processes[0].children()
        engines = [pid for pid in children if b"\0engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if len(engines) != 1:
            raise TargetError(f"{len(engines)} engines under chairlift up")
        killed_at_s = time.monotonic()
        os.kill(engines[0], signal.SIGKILL)
        return killed_at_s
