"""Engine and frontend as processes on this machine, ready to serve.

`python -m loadgen.experiments.pair FOLDER -- ENGINE FLAGS` starts a pair for other programs: it prints the frontend's
address when the pair serves, and stops it when stdin closes.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import grpc

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from loadgen.errors import LoadgenError
from loadgen.processes import Process, held_port, start_module, wait_until

_START_TIMEOUT_S = 600.0  # the engine may compile all CPU kernels first, on a busy machine
_OPTIONS = (("grpc.enable_http_proxy", 0),)


class Pair:
    """Both processes for the length of a `with` block, which starts them; call `wait_until_served` before use.

    Attributes:
        address: gRPC endpoint of the frontend, HOST:PORT.
        engine, frontend: the processes.
        model: the frontend's description of the model, set once it serves.
    """

    engine: Process
    frontend: Process

    def __init__(
        self,
        engine_flags: Sequence[str | Path],
        folder: Path,
        *,
        engine_module: str = "engine",
        frontend_flags: Sequence[str] = (),
    ) -> None:
        """Prepares the pair.

        Args:
            engine_flags: command line of the engine, without an address.
            folder: for logs and the socket between the two; created if missing. The path must be short: a socket's path
                has at most 107 bytes.
            engine_module: module that runs as the engine.
            frontend_flags: command line of the frontend, without addresses.
        """
        self._engine_flags = engine_flags
        self._folder = folder
        self._engine_module = engine_module
        self._frontend_flags = frontend_flags
        self.model = pb.GetModelResponse()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        socket = self._folder / "engine.sock"
        with ExitStack() as stack:
            port = stack.enter_context(held_port())
            self.address = f"127.0.0.1:{port}"
            # Both start at once: the frontend waits for its engine, and their imports overlap.
            flags = [*self._engine_flags, "--uds", socket, "--exit-on-stdin-close"]
            self.engine = start_module(self._engine_module, flags, self._folder / "engine.log")
            stack.callback(self.engine.stop)
            flags = ["--engine", f"unix:{socket}", "--port", str(port), "--no-http", *self._frontend_flags]
            log = self._folder / "frontend.log"
            self.frontend = start_module("frontend", flags, log)
            stack.callback(self.frontend.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of both."""
        return frozenset({self.engine.pid, self.frontend.pid})

    def wait_until_served(self) -> None:
        """Raises TargetError if a process ends or takes too long, with the last lines of its output."""
        with grpc.insecure_channel(self.address, options=_OPTIONS) as channel:
            stub = GenerationServiceStub(channel)

            def is_served() -> bool:
                try:
                    self.model = stub.GetModel(pb.GetModelRequest(), timeout=1.0)
                except grpc.RpcError:
                    return False
                return True

            wait_until(is_served, (self.engine, self.frontend), _START_TIMEOUT_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.experiments.pair", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for logs and the socket; its path must be short")
    parser.add_argument("engine_flags", nargs="*", metavar="ENGINE FLAG", help="after --")
    options = parser.parse_args(argv)
    try:
        with Pair(options.engine_flags, options.folder) as pair:
            pair.wait_until_served()
            print(pair.address, flush=True)
            sys.stdin.read()
    except LoadgenError as error:
        print(f"loadgen.experiments.pair: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
