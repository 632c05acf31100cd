"""`compare` reads runs from folders, groups repeats by label and refuses what does not belong together."""

import json
from pathlib import Path

import pytest

from loadgen.cli.main import main
from loadgen.measure.metrics import MeasureOptions
from loadgen.store import save
from tests.support.loadgen.runs import synthetic_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    settings = {"measure": MeasureOptions(slo={"ttft": 100.0}).as_json()}
    for number in (1, 2):
        save(synthetic_run(60, noise_seed=number, settings=settings), tmp_path / f"old/{number}")
        save(synthetic_run(60, noise_seed=10 + number, ttft_ms=30), tmp_path / f"new/{number}")
    save(synthetic_run(60, seed=7), tmp_path / "other")
    return tmp_path


def compare(*arguments: str) -> int:
    return main(["compare", "--resamples", "50", "--result-dir", "out", *arguments])


def document() -> dict[str, object]:
    found: dict[str, object] = json.loads(Path("out/comparison.json").read_text())
    return found


def test_two_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("old/1", "new/2") == 0
    assert (document()["baseline"], document()["repeats"]) == ("1", 1)
    said = capsys.readouterr().out
    assert "2 against 1" in said
    assert "TTFT p50 (ms)" in said
    assert {path.name for path in Path("out").iterdir()} >= {"comparison.html", "comparison-cdf.png"}


def test_the_folder_is_named_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("old/1", "new/2", "--result-dir", "out[gpu]") == 0
    assert "Results: out[gpu], picture and table" in capsys.readouterr().out


def test_labels_group_repeats_in_order(folder: Path) -> None:
    assert compare("old=old/1", "new=new/1", "old=old/2/result.json", "new=new/2/") == 0
    assert (document()["baseline"], document()["repeats"]) == ("old", 2)
    assert "old/1, old/2" in Path("out/comparison.html").read_text()


def test_folders_of_the_same_name_are_told_apart(folder: Path) -> None:
    assert compare("old/1", "new/1") == 0
    assert document()["baseline"] == "old/1"


def test_limits_are_those_of_the_first_run_unless_given(folder: Path) -> None:
    assert compare("old/1", "new/2") == 0
    assert document()["measure"]["slo"] == {"ttft": 100.0}  # type: ignore[index]
    Path("out").rename("before")
    assert compare("old/1", "new/2", "--goodput", "tpot:20", "--warmup", "1s") == 0
    assert document()["measure"]["slo"] == {"tpot": 20.0}  # type: ignore[index]
    assert document()["measure"]["warmup_s"] == 1.0  # type: ignore[index]


def test_other_workloads_are_refused_unless_forced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("old/1", "other") == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "chairlift-loadgen compare: error: arrival_s differs in 59 of 60 requests, first in request 1"
    )
    assert "--force" in error
    assert not Path("out").exists()
    assert compare("--force", "old/1", "other") == 0
    assert "FORCED: arrival_s differs" in capsys.readouterr().out
    assert document()["forced"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("old/1",), "at least two sides"),
        (("a=old/1", "a=old/2"), "at least two sides"),
        (("a=old/1", "a=old/2", "b=new/1"), "a has 2 runs and b 1"),
        (("a=old/1", "b=old/1"), "old/1 is named 2 times"),
        (("a=old/1", "a=old/../old/1", "b=new/1", "b=new/2"), "old/1 is named 2 times; name each run once"),
        (("old/1", "nowhere"), "nowhere: holds no run"),
        (("old/1", "=new/1"), r"=new/1: must be [LABEL=]DIR"),
        (("old/1", "new="), r"new=: must be [LABEL=]DIR"),
        (("old/1", "new/1", "--slo", "itl:2", "--slo", "itl:3"), "--goodput gives itl both 2.0 and 3.0"),
    ],
)
def test_bad_arguments_are_named(
    arguments: tuple[str, ...], why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*arguments) == 2
    assert why in capsys.readouterr().err
