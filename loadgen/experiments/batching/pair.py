"""An engine and a frontend as processes, ready to serve on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from loadgen.errors import TargetError

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.1
_LOG_LINES = 12
_CPUCLOCK_SCHED = 2  # a process's clock, numbered as clock_getcpuclockid(3) does on Linux
# Room for every case at once, and no waiting for a client that reads late: the queue is part of the experiment.
_QUEUED_REQUESTS, _QUEUED_TOKENS, _WINDOW_TOKENS = 1 << 16, 1 << 24, 1 << 16
_QUIET = (("grpc.enable_http_proxy", 0),)


class Pair:
    """Both processes for the length of a `with` block, at the beginning of which they start; call `wait_until_served`
    before anything else. They end with us, however we end.

    Attributes:
        step_log: what the engine writes.
        address: HOST:PORT of the frontend.
        model: what the frontend says of the model; set when it serves.
    """

    def __init__(self, engine_flags: Sequence[str], folder: Path) -> None:
        """Prepares; the `with` block starts.

        Args:
            engine_flags: its command line, without an address and a step log.
            folder: for logs and the socket between the two; made if it is not there. Its path must be short: a socket's
                has 107 bytes at most.
        """
        self.step_log = folder / "steps.jsonl"
        self._held_port = _held_port()
        self.address = f"127.0.0.1:{self._held_port.getsockname()[1]}"
        self.model = pb.GetModelResponse()
        self._engine_flags = engine_flags
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        path, port = self._folder / "engine.sock", self.address.rpartition(":")[2]
        try:
            # Both at once: the frontend waits for its engine.
            self._start(
                "engine",
                *(*self._engine_flags, "--uds", str(path), "--step-log", str(self.step_log), "--exit-on-stdin-close"),
            )
            self._start(
                "frontend",
                *("--engine", f"unix:{path}", "--port", port, "--no-reflection", "--no-http"),
                *("--max-queued-requests", str(_QUEUED_REQUESTS), "--max-queued-tokens", str(_QUEUED_TOKENS)),
                *("--token-window", str(_WINDOW_TOKENS)),
            )
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def wait_until_served(self) -> None:
        """Raises TargetError where a process ends or takes too long, with the last of what it printed."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        with grpc.insecure_channel(self.address, options=_QUIET) as channel:
            stub = GenerationServiceStub(channel)
            while True:
                try:
                    self.model = stub.GetModel(pb.GetModelRequest(), timeout=1.0)
                    return
                except grpc.RpcError:
                    time.sleep(_POLL_S)
                for module, process in self._running.items():
                    if process.poll() is not None:
                        raise TargetError(f"the {module} ended while starting:\n{self._last_lines(module)}")
                if time.monotonic() > deadline_s:
                    raise TargetError(f"not serving after {_START_TIMEOUT_S:g} s:\n{self._last_lines('engine')}")

    def frontend_cpu_s(self) -> float:
        """CPU seconds that the frontend has used so far, all its threads."""
        return time.clock_gettime((~self._running["frontend"].pid << 3) | _CPUCLOCK_SCHED)

    def _start(self, module: str, *arguments: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_")}
        with self._log(module).open("wb") as log:
            self._running[module] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,  # Ctrl-C is ours: we end them in order
            )

    def _log(self, module: str) -> Path:
        return self._folder / f"{module}.log"

    def _last_lines(self, module: str) -> str:
        return "\n".join(self._log(module).read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def _stop(self) -> None:
        for process in reversed(self._running.values()):
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._running.clear()
        self._held_port.close()


def _held_port() -> socket.socket:
    """Has a port of 127.0.0.1 that the system gives to nobody else meanwhile; who names it can listen there."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder
