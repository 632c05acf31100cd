"""Starts mock servers, in this process or in processes of their own, where their work is on another core."""

import asyncio
import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Literal

from loadgen.errors import LoadgenError
from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.engine import MockServer
from loadgen.mock.grpc_server import MockGrpcServer
from loadgen.mock.http_server import MockHttpServer

MockApi = Literal["grpc", "openai"]
_START_TIMEOUT_S = 60.0


def mock_server(
    api: MockApi, behaviour: MockBehaviour, host: str = "127.0.0.1", port: int = 0, *, shares_port: bool = False
) -> MockServer:
    """One that has not started yet."""
    kind = MockGrpcServer if api == "grpc" else MockHttpServer
    return kind(behaviour, host, port, shares_port=shares_port)


@contextlib.contextmanager
def mock_in_processes(api: MockApi, behaviour: MockBehaviour, num_processes: int = 1) -> Iterator[str]:
    """Servers in processes of their own, all on one port; yields their URL.

    Raises: LoadgenError: one did not start.
    """
    context = multiprocessing.get_context("spawn")
    processes = []
    url, port = "", 0
    try:
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            arguments = (api, behaviour, port, num_processes > 1, theirs)
            process = context.Process(target=_serve_in_process, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append((process, ours))
            try:
                url = ours.recv() if ours.poll(_START_TIMEOUT_S) else ""
            except EOFError:
                url = ""
            if not url:
                raise LoadgenError(f"a mock server did not start (exit code {process.exitcode})")
            port = int(url.removesuffix("/v1").rpartition(":")[2])
        yield url
    finally:
        for process, connection in processes:
            connection.close()  # tells it to end
            process.join(_START_TIMEOUT_S)


def _serve_in_process(
    api: MockApi, behaviour: MockBehaviour, port: int, shares_port: bool, connection: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(mock_server(api, behaviour, port=port, shares_port=shares_port), connection))


async def _serve(server: MockServer, connection: Connection) -> None:
    """Until the other end of the connection is closed."""
    over = asyncio.Event()
    await server.start()
    connection.send(server.url)
    asyncio.get_running_loop().add_reader(connection.fileno(), over.set)
    await over.wait()
    asyncio.get_running_loop().remove_reader(connection.fileno())
    await server.close()
