"""The command line: each benchmark of scheduling and against `transformers` runs small and leaves its samples."""

import json
import re
from pathlib import Path

import pytest

from engine.bench.__main__ import main
from engine.bench.registry import find_benchmarks

_QUICK = ["--quick", "--rounds", "2", "--threads", "1"]


def report_of(out: Path) -> dict:
    (path,) = out.iterdir()
    return json.loads(path.read_text())


def test_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(find_benchmarks())
    assert lines[0].split()[:2] == ["static-batching", "C1"]


@pytest.mark.parametrize(
    ("name", "ids", "contestants"),
    [
        ("C1", {"C1"}, {"fcfs", "static"}),
        ("transformers-generate", {"C2", "C3"}, {"transformers", "fp32", "int8"}),
        ("C4", {"C4"}, {"transformers", "fp32", "int8"}),
    ],
)
def test_a_contest_leaves_its_samples(
    name: str, ids: set[str], contestants: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, *_QUICK, "--out", str(tmp_path)]) == 0
    report = report_of(tmp_path)
    assert {result["benchmark_id"] for result in report["results"]} == ids
    assert {name: len(values) for name, values in report["raw"]["seconds"].items()} == dict.fromkeys(contestants, 2)
    assert report["arguments"]["rounds"] == 2
    assert report["machine"]["floors"]["threads"] == 1
    out = capsys.readouterr().out
    assert "the figures mean nothing" in out
    assert str(tmp_path) in out


def test_the_engine_saves_the_steps_that_the_simulation_predicts(tmp_path: Path) -> None:
    assert main(["C1", *_QUICK, "--out", str(tmp_path)]) == 0
    report = report_of(tmp_path)
    steps = {policy: len(rows) for policy, rows in report["raw"]["rows_of_steps"].items()}
    assert steps == report["raw"]["simulated_steps"]
    assert steps["fcfs"] < steps["static"]


def test_paging_wastes_half_a_block_per_sequence_and_reserving_the_rest_of_the_maximum(tmp_path: Path) -> None:
    assert main(["kv-cache-use", *_QUICK, "--out", str(tmp_path)]) == 0
    report = report_of(tmp_path)
    waste, admitted, _ = report["results"]
    assert waste["figure"] == pytest.approx(waste["floor"], rel=0.1)
    assert admitted["floor"] * 0.75 < admitted["figure"] <= admitted["floor"]
    assert set(report["raw"]["reserved"]["num_sequences"]) == {8}


def test_step_overhead_says_where_its_time_goes(tmp_path: Path) -> None:
    assert main(["step-overhead", *_QUICK, "--out", str(tmp_path)]) == 0
    report = report_of(tmp_path)
    assert len(report["results"]) == 4
    for name, rounds in report["raw"]["parts_ms"].items():
        assert report["raw"]["median_step_ms"][name] == [times[0] for times in rounds]
        assert all(sum(times[1:]) == pytest.approx(times[0], rel=0.5) for times in rounds)


def test_wrong_ids_end_a_benchmark_before_speed_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "engine.bench.transformers_generate.generate",
        lambda _model, workload, _num_seats: tuple((1,) * length for length in workload.max_tokens),
    )
    assert main(["C3", *_QUICK, "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "engine.bench transformers-generate: error: transformers: 2" in captured.err
    assert "ids are wrong" in captured.err
    assert "tokens/s" not in captured.out
    assert not list(tmp_path.iterdir())


def test_more_threads_than_there_are_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["C1", "--quick", "--threads", "5000"]) == 1
    assert re.search(r"error: --threads: 5000 threads asked for, 1 to \d+ can be had", capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["no-such-benchmark"], [], ["C1", "--rounds", "0"], ["C1", "--threads", "x"]])
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
