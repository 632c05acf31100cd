"""The stand-by as a process, with small fake engines."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from loadgen.processes import held_port
from tests.hang import HANG_S

# Prints a line when it runs and another one on SIGTERM.
ENGINE = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a signal between two calls waits for the second
print("engine runs", flush=True)
signal.sigwait({signal.SIGTERM})
print("drained", flush=True)
"""
# The stand-by's main, with shorter intervals.
MAIN = """
import sys
from deploy import engine_standby
engine_standby.TIMEOUT_S = float(sys.argv[1])
sys.exit(engine_standby.main(sys.argv[2:], watch_s=0.05))
"""

# Before MAIN: a signal comes when the engine's process is there and the stand-by does not know it yet.
EARLY_SIGNAL = """
import os, signal, subprocess
class Signalled(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Signalled
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """start(address, code, before, timeout_s): the stand-by for an engine at an address, around a program.

    `before` runs first; `timeout_s` limits each health check.
    """
    processes: list[subprocess.Popen[str]] = []

    def start_one(
        address: str, code: str = ENGINE, before: str = "", timeout_s: float = HANG_S
    ) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", before + MAIN, str(timeout_s), address, sys.executable, "-c", code]
        processes.append(subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start_one
    for process in processes:
        process.terminate()  # it passes that on; killed, it would leave its engine behind
        process.communicate(timeout=HANG_S)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


class Other(HealthServicer):
    """The health of another engine, at first while that one loads."""

    def __init__(self) -> None:
        super().__init__()
        self.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self.asked = threading.Semaphore(0)

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Any:
        self.asked.release()
        return super().Check(request, context)

    def serve(self) -> None:
        """It has loaded."""
        self.set("", health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
def listen() -> Iterator[Callable[[str], Other]]:
    """listen(address): another engine begins to load there."""
    servers = []

    def listen_at(address: str) -> Other:
        servers.append(grpc.server(ThreadPoolExecutor(1)))
        other = Other()
        health_pb2_grpc.add_HealthServicer_to_server(other, servers[-1])
        servers[-1].add_insecure_port(address)
        servers[-1].start()
        return other

    yield listen_at
    for server in servers:
        server.stop(None)


@pytest.fixture
def address() -> Iterator[str]:
    """An address at which no server listens yet."""
    with held_port() as port:
        yield f"127.0.0.1:{port}"


def test_engine_serves_while_the_other_one_loads_then_drains_and_stands_by(
    start: Start, address: str, listen: Callable[[str], Other]
) -> None:
    process = start(address)
    assert line(process) == "engine runs"
    other = listen(address)
    for _ in range(3):
        assert other.asked.acquire(timeout=HANG_S)  # an engine that drains asks no more
    other.serve()
    assert line(process) == "drained"
    assert line(process) == f"an engine serves at {address}: this one stands by"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 0


def test_engine_is_not_started_where_the_other_one_serves_already(
    start: Start, address: str, listen: Callable[[str], Other]
) -> None:
    listen(address).serve()
    process = start(address)
    assert line(process).endswith("this one stands by")
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 0


def test_listener_that_is_no_engine_is_none(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert line(start(address, timeout_s=0.1)) == "engine runs"


def test_without_another_engine_it_is_the_engine(start: Start, address: str) -> None:
    process = start(address)
    assert line(process) == "engine runs"
    process.send_signal(signal.SIGTERM)
    assert line(process) == "drained"
    assert process.wait(HANG_S) == 0


def test_signal_that_comes_while_the_engine_is_started_reaches_it(start: Start, address: str) -> None:
    code = "import signal; signal.pause()"  # so early, the signal itself ends it
    assert start(address, code, EARLY_SIGNAL).wait(HANG_S) == 128 + signal.SIGTERM


def test_unknown_name_is_no_engine(start: Start) -> None:
    assert line(start("engine-gpu.invalid.:50052")) == "engine runs"


def test_exit_status_is_the_engines(start: Start, address: str) -> None:
    assert start(address, "import sys; sys.exit(2)").wait(HANG_S) == 2


def test_killed_engine_is_told_from_others_in_one_line(start: Start, address: str) -> None:
    process = start(address, "import os; os.kill(os.getpid(), 9)")
    assert process.wait(HANG_S) == 128 + 9
    assert "ENGINE_MEMORY" in line(process)
    assert line(process) == ""
