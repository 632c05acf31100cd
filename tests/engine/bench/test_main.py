"""The command line: benchmarks of scheduling run with --quick and write their samples."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.bench.__main__ import main
from engine.bench.benchmarks import BENCHMARKS

_QUICK = ["--quick", "--rounds", "2", "--threads", "1"]


def report_of(out: Path) -> dict:
    (path,) = out.iterdir()
    return json.loads(path.read_text())


def test_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(BENCHMARKS)


def test_paging_wastes_half_a_block_per_sequence_and_reserving_the_rest_of_the_maximum(tmp_path: Path) -> None:
    assert main(["kv-cache-use", *_QUICK, "--out", str(tmp_path)]) == 0
    report = report_of(tmp_path)
    waste, admitted, _, *windows = report["results"]
    assert waste["figure"] == pytest.approx(waste["floor"], rel=0.1)
    assert admitted["floor"] * 0.75 < admitted["figure"] <= admitted["floor"]
    assert set(report["raw"]["reserved"]["num_sequences"]) == {8}
    assert len(windows) == 3
    assert all(result["figure"] > 1.3 for result in windows)


def test_step_overhead_reports_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by 1 ms whenever it is read: at the start, and at the end of each of five parts."""
    ticks = itertools.count()
    monkeypatch.setattr("engine.bench.step_overhead.time", SimpleNamespace(perf_counter=lambda: 0.001 * next(ticks)))
    assert main(["step-overhead", *_QUICK, "--out", str(tmp_path)]) == 0
    report = report_of(tmp_path)
    *steps, churning, steady = report["results"]
    assert len(steps) == len(report["raw"]["parts_ms"]) == 6
    assert churning["figure"] == steady["figure"] == pytest.approx(1.0)
    for name, rounds in report["raw"]["parts_ms"].items():
        assert report["raw"]["median_step_ms"][name] == [times[0] for times in rounds]
        assert all(times == pytest.approx([4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]) for times in rounds)


@pytest.mark.slow
def test_launches_of_a_layer_are_timed_by_both_ways(tmp_path: Path) -> None:
    """In a process of its own, because Triton's interpreter must be off."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.bench", "launch-overhead", *_QUICK, "--out", str(tmp_path)]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    report = report_of(tmp_path)
    assert len(report["results"]) == 6
    assert report["results"][0]["note"].startswith("6 launches")
    assert all(len(times) == 2 and min(times) > 0 for times in report["raw"]["layer_us"].values())


def test_more_threads_than_there_are_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["C5", "--quick", "--threads", "5000"]) == 1
    assert re.search(r"error: --threads: 5000 threads asked for, 1 to \d+ can be had", capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["no-such-benchmark"], [], ["C5", "--rounds", "0"], ["C5", "--threads", "x"]])
def test_wrong_command_line_is_rejected(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2


def test_drafts_are_measured_where_they_help_and_where_they_do_not(tmp_path: Path) -> None:
    assert main(["speculative", *_QUICK, "--out", str(tmp_path)]) == 0
    report = report_of(tmp_path)
    cases = report["raw"]
    assert len(report["results"]) == 2 * len(cases) == 12
    right, *_, wrong = cases.values()
    assert right["num_accepted_tokens"] == right["num_draft_tokens"] > 16
    assert wrong["num_accepted_tokens"] < 0.2 * wrong["num_draft_tokens"]
    assert all(case["num_draft_tokens"] == 0 for name, case in cases.items() if "nothing" in name)
