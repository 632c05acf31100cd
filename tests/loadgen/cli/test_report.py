"""`chairlift-loadgen report`: the records are enough."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli.main import main
from loadgen.measure.metrics import MeasureOptions
from loadgen.record import Status
from loadgen.store import RECORDS, save
from tests.support.loadgen.runs import synthetic_run

_PLAYED_WITH = MeasureOptions(warmup_s=1.0, slo={"ttft": 100.0}, percentiles=(50.0, 90.0, 99.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(synthetic_run(200, settings={"measure": _PLAYED_WITH.as_json()}), tmp_path / "run")
    return tmp_path / "run"


def _result(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    assert isinstance(result, dict)
    return result


def test_it_measures_as_the_run_did_unless_told_otherwise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    result = _result(folder)
    assert (result["window"]["warmup_s"], result["slo"]["limits_ms"]) == (1.0, {"ttft": 100.0})
    assert "p90_ttft_ms" in result
    assert "VALID: the figures may be quoted" in capsys.readouterr().out
    assert (folder / "report.html").exists()


def test_limits_percentiles_and_warm_up_can_be_changed_afterwards(folder: Path) -> None:
    flags = ["--goodput", "tpot:12", "e2el:900", "--metric-percentiles", "75,99.9", "--warmup", "3s"]
    assert main(["report", str(folder), *flags]) == 0
    result = _result(folder)
    assert result["slo"]["limits_ms"] == {"tpot": 12.0, "e2el": 900.0}
    assert "p75_ttft_ms" in result
    assert "p90_ttft_ms" not in result
    assert result["window"]["start_s"] == 3.0


def test_two_limits_of_one_metric_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--goodput", "ttft:100", "ttft:100", "ttft:5000"]) == 2
    assert "--goodput gives ttft both 100.0 and 5000.0; give one of them" in capsys.readouterr().err


def test_reports_can_go_elsewhere(folder: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert main(["report", str(folder), "--result-dir", str(tmp_path / "other")]) == 0
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (tmp_path / "other" / "timeline.png").exists()


def test_reports_of_another_run_are_not_replaced(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(synthetic_run(50), tmp_path / "second")
    assert main(["report", str(tmp_path / "second")]) == 0
    before = (tmp_path / "second" / "result.json").read_bytes()
    assert main(["report", str(folder), "--result-dir", str(tmp_path / "second")]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert (tmp_path / "second" / "result.json").read_bytes() == before
    assert main(["report", str(folder), "--result-dir", str(folder / ".." / "run")]) == 0


@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--strict"], 3)])
def test_strict_fails_an_invalid_run(flags: list[str], status: int, tmp_path: Path) -> None:
    save(synthetic_run(50, outcomes={Status.ERROR: 20}), tmp_path)
    assert main(["report", str(tmp_path), *flags]) == status


def test_a_damaged_or_missing_run_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / RECORDS).write_bytes((folder / RECORDS).read_bytes()[:-9])
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"chairlift-loadgen report: error: {folder}: the run is damaged")
    assert main(["report", str(folder / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err
