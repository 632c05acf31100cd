"""The command line: every experiment runs small and leaves its samples."""

import dataclasses
import json
from pathlib import Path

import pytest

from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from engine.bench.benchmarks import BENCHMARKS
from loadgen.experiments.__main__ import main
from loadgen.experiments.benchmarks import BENCHMARKS as EXPERIMENTS
from loadgen.experiments.peers.worker import WorkerSystem

ALL = BENCHMARKS + EXPERIMENTS


def test_names_and_ids_of_all_benchmarks_are_unique() -> None:
    names = [name for benchmark in ALL for name in (benchmark.name, *benchmark.ids)]
    assert len(names) == len(set(names))
    assert "list" not in names


def test_every_benchmark_runs_and_documents_its_goals_and_method() -> None:
    for benchmark in ALL:
        text = benchmark.module().__doc__ or ""
        assert callable(getattr(benchmark.module(), benchmark.target.partition(":")[2] or "run"))
        for benchmark_id in benchmark.ids:
            assert benchmark_id in text, f"{benchmark.name} does not explain {benchmark_id}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ids"), [("transformers-generate", {"C2", "C3"}), ("C4", {"C4"})])
def test_transformers_are_compared_with_both_precisions(name: str, ids: set[str], tmp_path: Path) -> None:
    assert main([name, "--quick", "--rounds", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert {result["benchmark_id"] for result in report["results"]} == ids
    seconds = report["raw"]["seconds"]
    assert {name: len(values) for name, values in seconds.items()} == {"transformers": 2, "fp32": 2, "int8": 2}


@pytest.mark.slow
def test_wrong_ids_end_a_comparison_before_speed_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_ones(self: WorkerSystem, workload: Workload) -> Run:
        run = generate(self, workload)
        return dataclasses.replace(run, output_ids=tuple((1,) * limit for limit in workload.max_tokens))

    generate = WorkerSystem.generate
    monkeypatch.setattr(WorkerSystem, "generate", with_ones)
    assert main(["C3", "--quick", "--threads", "1", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "ids are wrong" in captured.err
    assert "tokens/s" not in captured.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "raw_key"), [("C17", "8 per message"), ("C18", "latencies_ms"), ("C19", "ttft_s")])
def test_quick_run_keeps_its_raw_samples(
    name: str, raw_key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--quick", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert raw_key in report["raw"]
    assert {result["benchmark_id"] for result in report["results"]} == {name}
    assert all(result["figure"] > 0 for result in report["results"])
    assert name in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine under chairlift up in /proc")
def test_failover_measures_pauses_of_complete_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["failover", "--quick", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    raw = json.loads(path.read_text())["raw"]
    assert set(raw) == {"two engines", "one engine"}
    for scenario in raw.values():
        (pauses_s,), (restart_s,) = scenario["pauses_s"], scenario["restart_s"]
        assert pauses_s
        assert min(pauses_s) > 0
        assert restart_s > 0.1  # no engine restarts faster
    assert min(raw["one engine"]["pauses_s"][0]) > 0.1  # nor does a token arrive before
    assert "R2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pace", "frontend"), [("paced", "1 worker, no coalescing"), ("flat out", "2 workers, uvloop")]
)
def test_endpoints_are_compared(pace: str, frontend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--quick", "--rounds", "1", "--threads", "1", "--out", str(tmp_path), "--pace", pace, "--only", frontend)
    assert main(["endpoints", *flags]) == 0
    (path,) = tmp_path.glob("*.json")
    raw = json.loads(path.read_text())["raw"]
    assert set(raw) == {pace}
    assert set(raw[pace]) == {f"{api}, {name}" for api in ("gRPC", "HTTP") for name in ("1 worker", frontend)}
    for name, (turn,) in raw[pace].items():
        assert min(turn.values()) > 0
        assert turn["tokens_per_message"] == 1 or "no coalescing" not in name
    assert f"HTTP, {frontend}: {pace}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_twin_is_compared_with_a_real_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "--quick", "--loads", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    load = json.loads(path.read_text())["raw"]["loads"]["2"]
    for name in ("interactive", "standard", "batch"):
        real, twin = (sum(load[side][name].values()) for side in ("real", "twin"))
        assert real == twin > 0
        assert len(load["samples"]["real"][name]["itl_ms"]) > 0
    assert "2x of the capacity" in capsys.readouterr().out


@pytest.mark.slow
def test_the_governor_is_compared_with_fixed_budgets(tmp_path: Path) -> None:
    assert main(["governor", "--quick", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    raw = json.loads(path.read_text())["raw"]
    for name in ("slo", "fixed 2048", "fixed 512"):
        assert len(raw[name]["gaps_s"]) > 16
        assert raw[name]["num_answered"] > 0
