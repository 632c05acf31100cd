import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from loadgen.cli.main import main
from loadgen.run.controller import RunOptions, run_workload
from loadgen.target.base import TargetSpec
from tests.support.loadgen.runs import Answered, run_of

WORKLOAD = run_of([Answered(0.0, output_tokens=9) for _ in range(6)]).workload


@pytest.mark.parametrize("api", ["grpc", "openai"])
def test_it_serves_until_ctrl_c_and_says_what_it_saw(api: Any) -> None:
    command = [
        sys.executable,
        "-m",
        "loadgen",
        "mock-server",
        "--api",
        api,
        "--port",
        "0",
        "--ttft",
        "50ms",
        "--itl",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as server:
        watchdog = threading.Timer(90.0, server.kill)
        watchdog.start()
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("serving on ").strip()
        run = run_workload(WORKLOAD, TargetSpec(url, "grpc" if api == "grpc" else "completions"), RunOptions())
        server.send_signal(signal.SIGINT)
        said = server.stdout.read()
        assert server.wait() == 0
        watchdog.cancel()
    assert (run.requests["num_tokens"] == 9).all()
    assert (run.requests["first_ns"] - run.requests["sent_ns"] >= 49e6).all()
    assert said.startswith("6 requests, 54 tokens sent, at most ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--host", "999.0.0.1"], r"--host 999.0.0.1 --port 50051: [\w ]+; choose another"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mock-server", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(complaint, said)


@pytest.mark.parametrize("api", ["grpc", "openai"])
def test_a_port_that_is_taken_is_one_line(api: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["mock-server", "--api", api, "--port", str(port)]) == 2
    said = capfd.readouterr().err  # of the process: gRPC does not write through Python
    assert said == (
        f"chairlift-loadgen mock-server: error: --host 127.0.0.1 --port {port}: {os.strerror(errno.EADDRINUSE)}; "
        "choose another address, --port 0 takes a free port\n"
    )


@pytest.mark.parametrize(
    "arguments", [["--port", "70000"], ["--overhead-tokens", "-1"], ["--jitter", "2"], ["--output-share", "0"]]
)
def test_numbers_out_of_range_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["mock-server", *arguments])
    assert arguments[0] in capsys.readouterr().err
