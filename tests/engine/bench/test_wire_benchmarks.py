import json
from pathlib import Path

import pytest

from engine.bench.__main__ import main


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
def test_failover_measures_pauses_of_whole_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["failover", "--quick", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    raw = json.loads(path.read_text())["raw"]
    assert set(raw) == {"two engines", "one engine"}
    for contest in raw.values():
        (pauses_s,), (restart_s,) = contest["pauses_s"], contest["restart_s"]
        assert pauses_s
        assert min(pauses_s) > 0
        assert restart_s > 0.1  # no engine is back before that
    assert min(raw["one engine"]["pauses_s"][0]) > 0.1  # nor does anybody get a token before
    assert "R2" in capsys.readouterr().out


def test_doors_are_compared_with_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doors", "--quick", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    raw = json.loads(path.read_text())["raw"]
    assert set(raw) == {"paced", "flat out"}
    for contestants in raw.values():
        assert len(contestants) == 10
        for name, (run,) in contestants.items():
            assert min(run.values()) > 0
            assert run["tokens_per_message"] == 1 or "no coalescing" not in name
    assert "HTTP, 2 workers, uvloop: flat out" in capsys.readouterr().out
