import os
import time
from pathlib import Path

import pytest

from loadgen.experiments.processes import Process, cpu_s


def test_cpu_seconds_are_those_of_the_process() -> None:
    before = time.process_time()
    measured = cpu_s(os.getpid())
    assert before <= measured <= time.process_time()


def test_cpu_seconds_of_nobody_are_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        cpu_s(2**22 + 1)  # above the kernel's largest


def test_process_prints_to_its_log_and_stops(tmp_path: Path) -> None:
    process = Process("json.tool", ["--help"], tmp_path / "log")
    process.stop()
    assert process.has_ended


def test_last_lines_are_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Process("json.tool", ["/nowhere"], log)
    process._popen.wait()
    assert "/nowhere" in process.last_lines()
    log.write_text("\n".join(map(str, range(100))))
    assert process.last_lines().splitlines()[-1] == "99"
    assert len(process.last_lines().splitlines()) < 100
    process.stop()


def test_users_settings_do_not_reach_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_ENGINE_PORT", "no number")  # the engine would refuse to start
    process = Process("engine", ["--help"], tmp_path / "log")
    assert process._popen.wait() == 0, process.last_lines()
    process.stop()
