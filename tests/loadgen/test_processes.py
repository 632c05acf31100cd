import os
import sys
import time
from pathlib import Path

import pytest

from loadgen.processes import Process, cpu_s, start_module


def test_cpu_seconds_are_those_of_the_process() -> None:
    before = time.process_time()
    measured = cpu_s(os.getpid())
    assert before <= measured <= time.process_time()


def test_cpu_seconds_of_a_missing_process_are_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        cpu_s(2**22 + 1)  # above the kernel's largest


def test_process_prints_to_its_log_and_stops(tmp_path: Path) -> None:
    process = start_module("json.tool", ["/nowhere"], tmp_path / "log")
    process._popen.wait()
    assert "/nowhere" in process.last_lines()
    process.stop()
    assert process.exit_status is not None


def test_last_lines_are_the_end_of_the_log(tmp_path: Path) -> None:
    process = Process([sys.executable, "-c", "print(*range(100), sep='\\n')"], tmp_path / "log")
    process._popen.wait()
    lines = process.last_lines().splitlines()
    assert lines[-1] == "99"
    assert len(lines) < 100
    process.stop()


def test_settings_of_the_user_do_not_reach_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_ENGINE_PORT", "no number")  # the engine would refuse to start
    process = start_module("engine", ["--help"], tmp_path / "log")
    assert process._popen.wait() == 0, process.last_lines()
    process.stop()
