"""A frontend with both doors open and some flags, in front of an engine that runs already."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from chairlift.bench.benchmark import BenchmarkError
from loadgen.experiments.endpoint_clients import ask_grpc
from loadgen.experiments.held_port import held_port
from loadgen.experiments.processes import Process, cpu_s

_POLL_S = 0.2
_START_TIMEOUT_S = 60.0
_NUM_PROBES = 16  # each on a connection of its own: all workers answer


class Doors:
    """The frontend's processes, for the length of a `with` block.

    Attributes:
        ports: by the name of the door.
    """

    def __init__(self, engine_socket: Path, flags: Sequence[str], log: Path) -> None:
        """Prepares; the `with` block starts.

        Args:
            engine_socket: where the engine is.
            flags: of the frontend, without addresses.
            log: file for what it prints.
        """
        self._engine_socket = engine_socket
        self._flags = flags
        self._log = log

    def __enter__(self) -> Self:
        self._held_ports = ExitStack()
        self.ports = {door: self._held_ports.enter_context(held_port()) for door in ("gRPC", "HTTP")}
        ports = ("--port", str(self.ports["gRPC"]), "--http-port", str(self.ports["HTTP"]))
        self._process = Process(
            "frontend", ["--engine", f"unix:{self._engine_socket}", *ports, *self._flags], self._log
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop()
        self._held_ports.close()

    async def wait_served(self) -> None:
        """Waits until every worker takes requests.

        Raises: BenchmarkError: it does not come to that.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not await self._is_served():
                    if self._process.has_ended:
                        raise BenchmarkError(f"the frontend ended while starting:\n{self._process.last_lines()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BenchmarkError(f"not serving after {_START_TIMEOUT_S:g} s:\n{self._process.last_lines()}") from None

    def cpu_s(self) -> float:
        """CPU seconds of all its processes."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return cpu_s(pid) + sum(cpu_s(int(child)) for child in children)

    async def _is_served(self) -> bool:
        try:
            await asyncio.gather(*(ask_grpc(self.ports["gRPC"], 1) for _ in range(_NUM_PROBES)))
        except BenchmarkError:
            return False
        return True
