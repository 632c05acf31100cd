"""The stand-by as a process, with small stand-ins for the two engines."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Says that it runs, and when it is asked to end.
ENGINE = """
import signal, sys
def end(*_):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("engine runs", flush=True)
signal.pause()
"""
# As the stand-by's own main, looking more often.
MAIN = "import sys, importlib.util as u; s = u.spec_from_file_location('m', sys.argv[1]); m = u.module_from_spec(s); \
s.loader.exec_module(m); sys.exit(m.main(sys.argv[2:], watch_s=0.05))"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """start(address, code): the stand-by for an engine at an address, around a program."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(address: str, code: str = ENGINE) -> "subprocess.Popen[str]":
        path = root / "deploy" / "engine_standby.py"
        command = [sys.executable, "-c", MAIN, str(path), address, sys.executable, "-c", code]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start_one
    for process in processes:
        process.terminate()  # it passes that on; killed, it would leave its engine behind
        process.communicate(timeout=10)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def listener(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def free_port() -> int:
    with listener() as probe:
        return int(probe.getsockname()[1])


def test_engine_drains_and_stands_by_when_the_other_one_comes(start: Start) -> None:
    port = free_port()
    process = start(f"127.0.0.1:{port}")
    assert line(process) == "engine runs"
    with listener(port):
        assert line(process) == "drained"
        assert line(process) == f"an engine answers at 127.0.0.1:{port}: this one stands by"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_engine_is_not_started_where_the_other_one_is_there_first(start: Start) -> None:
    with listener() as other:
        process = start(f"127.0.0.1:{other.getsockname()[1]}")
        assert line(process).endswith("this one stands by")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_without_another_engine_it_is_the_engine(start: Start) -> None:
    process = start(f"127.0.0.1:{free_port()}")
    assert line(process) == "engine runs"
    process.send_signal(signal.SIGTERM)
    assert line(process) == "drained"
    assert process.wait(10) == 0


def test_name_that_nobody_has_is_no_engine(start: Start) -> None:
    assert line(start("engine-gpu.invalid.:50052")) == "engine runs"


def test_exit_status_is_the_engines(start: Start) -> None:
    assert start(f"127.0.0.1:{free_port()}", "import sys; sys.exit(2)").wait(10) == 2


def test_killed_engine_is_told_from_others_in_one_line(start: Start) -> None:
    process = start(f"127.0.0.1:{free_port()}", "import os; os.kill(os.getpid(), 9)")
    assert process.wait(10) == 128 + 9
    assert "ENGINE_MEMORY" in line(process)
    assert line(process) == ""
