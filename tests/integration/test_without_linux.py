"""The pair without Linux's own interfaces and files, as on macOS, which has neither: Linux with them taken away."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import Client
from tests.hang import HANG_S
from tests.support.pair import PairAddress, Processes, wait_until_served

ROOT = Path(__file__).parents[2]
IS_AWAY = """
import os, pathlib, socket
assert not pathlib.Path("/proc/cpuinfo").exists() and not hasattr(os, "sched_getaffinity")
assert not hasattr(socket, "SOCK_NONBLOCK")
"""


@pytest.fixture(autouse=True)
def _without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (ROOT / "tests" / "support" / "without_linux", ROOT, ROOT / "protos")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


def test_it_is_away() -> None:
    done = subprocess.run([sys.executable, "-c", IS_AWAY], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


def test_one_command_starts_serves_and_drains_with_the_same_answers(
    pair: PairAddress, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    processes = Processes(tmp_path)
    port = free_port()
    process = processes.start("frontend.cli.main", "up", "--port", str(port), "--http-port", "0")
    try:
        wait_until_served(f"127.0.0.1:{port}", processes)
        texts = []
        for target in (f"127.0.0.1:{port}", pair.target):
            with Client(target) as client:
                texts.append(client.generate("Once upon a time", max_tokens=24, temperature=0.9, seed=5).text)
        assert texts[0] == texts[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        log = processes.log(process)
        assert "Traceback" not in log, log
    finally:
        processes.stop()
