"""An engine and a frontend, ready to serve on this machine."""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from engine.bench.serve import Run
from engine.config import EngineConfig
from loadgen.experiments.client import Client
from loadgen.experiments.held_port import held_port
from loadgen.experiments.processes import Process

_START_TIMEOUT_S = 300.0


class Pair:
    """Both processes for the length of a `with` block, and a client that is connected.

    Attributes:
        engine, frontend: the processes.
        address: of the frontend, HOST:PORT.
        client: calls the frontend.
    """

    def __init__(
        self,
        engine_flags: Sequence[str | Path],
        folder: Path,
        *,
        engine_module: str = "engine",
        python_path: Sequence[Path] = (),
    ) -> None:
        """Prepares; the `with` block starts.

        Args:
            engine_flags: its command line, without an address.
            folder: for logs and the socket between the two; made if it is not there. The path must be short: a socket's
                has 107 bytes at most.
            engine_module: what to run as the engine.
            python_path: folders with packages that the frontend needs and this process does not.
        """
        self._engine_flags = engine_flags
        self._folder = folder
        self._engine_module = engine_module
        self._python_path = python_path

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "engine.sock"
        self._held_ports = ExitStack()
        port = self._held_ports.enter_context(held_port())
        self.address = f"127.0.0.1:{port}"
        # Both at once: the frontend waits for its engine, and the imports of both overlap.
        self.engine = Process(
            self._engine_module,
            [*self._engine_flags, "--uds", path, "--exit-on-stdin-close"],
            self._folder / "engine.log",
        )
        self.frontend = Process(
            "frontend",
            ["--engine", f"unix:{path}", "--port", str(port), "--no-http"],
            self._folder / "frontend.log",
            python_path=self._python_path,
        )
        self.client = Client(self.address)
        self.client.__enter__()
        try:
            self._wait_until_served()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.__exit__(kind, value, trace)
        self.frontend.stop()
        self.engine.stop()
        self._held_ports.close()

    def generate(self, workload: Workload) -> Run:
        """See `Contender.generate`."""
        return self.client.generate(workload).run

    @property
    def pids(self) -> frozenset[int]:
        """See `Contender.pids`."""
        return frozenset({self.engine.pid, self.frontend.pid})

    def _wait_until_served(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self.client.is_served():
            for process in (self.engine, self.frontend):
                if process.has_ended:
                    raise BenchmarkError(f"the {process.name} ended while starting:\n{process.last_lines()}")
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"not serving after {_START_TIMEOUT_S:g} s:\n{self.engine.last_lines()}")


def engine_flags(config: EngineConfig) -> list[str]:
    """The command line that makes an engine of this configuration, as far as it is not the default."""
    flags = ["--model", config.model]
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        if option.name == "model" or value == option.default:
            continue
        flag = option.name.removesuffix("_s").replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags
