"""The reports of a sweep: table, page, pictures and figures, whatever the load levels are like."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadgen.checks.finding import Level
from loadgen.checks.selfcheck import judge
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.record import RunData, Status
from loadgen.report.plot_style import png
from loadgen.report.plot_sweep import sweep_pictures
from loadgen.report.sweep_files import write_sweep
from loadgen.report.sweep_text import COLUMNS, cells, sweep_document, sweep_lines
from loadgen.sweep.load_level import Axis, LoadLevel, load_level_of
from loadgen.sweep.sweep import Sweep, sweep
from tests.support.loadgen.runs import Answered, run_of, synthetic_run

SLO = {"ttft": 150.0, "tpot": 40.0}


def played(load: float, run: RunData | None = None, level: Level = "VALID") -> LoadLevel:
    run = run or synthetic_run(60, rate=max(load, 1.0), ttft_ms=40 + 10 * load)
    metrics = measure(run, MeasureOptions(slo=SLO))
    load_level = load_level_of(load, run, metrics, judge(run, metrics), f"rate-{load:g}")
    return replace(load_level, level=level, reasons=() if level == "VALID" else ("errors: 7 of 100 failed",))


def climbed(loads: list[float], *, axis: Axis = "rate", invalid: tuple[float, ...] = ()) -> Sweep:
    return sweep(
        loads,
        lambda load: played(load, level="INVALID" if load in invalid else "VALID"),
        axis=axis,
        targets=(0.9, 0.99),
        keep_going=True,
        retries=0,
    )


def test_everything_is_written(tmp_path: Path) -> None:
    result = climbed([2, 4, 8, 16])
    paths = write_sweep(result, SLO, tmp_path, about={"target": "grpc://127.0.0.1:50051"})
    assert {path.name for path in paths} == {
        "sweep.json", "sweep.html",
        "sweep-latency.png", "sweep-normalized.png", "sweep-goodput.png", "sweep-pareto.png",
    }  # fmt: skip
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths if path.suffix == ".png")
    page = (tmp_path / "sweep.html").read_text()
    assert "grpc://127.0.0.1:50051" in page
    assert "90 % of requests keep TTFT 150 ms, TPOT 40 ms" in page
    assert set(re.findall(r'(?:src|href)="([^#"][^"]*)"', page)) == {
        f"rate-{load}/report.html" for load in (2, 4, 8, 16)
    }


def test_without_limits_there_is_no_goodput(tmp_path: Path) -> None:
    result = sweep([2, 4], played)
    names = {path.name for path in write_sweep(result, {}, tmp_path)}
    assert "sweep-goodput.png" not in names
    assert cells(result.load_levels[0], limits=False)[-2:] == ["-", "-"]


def test_the_document_is_plain_and_whole() -> None:
    document = sweep_document(climbed([2, 4], invalid=(4,)), SLO)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [load_level["used"] for load_level in document["rungs"]] == [True, False]
    assert document["rungs"][0]["ttft_ms"]["p99"] > document["rungs"][0]["ttft_ms"]["p50"] > 0
    assert document["answers"][0]["load"] == 2
    assert document["slo"] == SLO


def test_the_table_has_a_row_for_every_load_level_and_says_why_one_is_not_used() -> None:
    text = "\n".join(line.plain for line in sweep_lines(climbed([2, 4], invalid=(4,)), SLO))
    assert all(column in text for column in COLUMNS)
    assert "not used: errors: 7 of 100 failed" in text
    assert text.count("INVALID") >= 2
    assert len(cells(played(2), limits=True)) == len(COLUMNS)


def test_dots_are_where_the_figures_are_and_invalid_ones_are_apart() -> None:
    result = climbed([1, 2, 4, 8], invalid=(4,))
    pictures = {picture.name: picture for picture in sweep_pictures(result, SLO)}
    ttft = pictures["sweep-latency"].figure.axes[0]
    curve = next(line for line in ttft.lines if len(line.get_xdata()) == 3)
    np.testing.assert_array_equal(curve.get_xdata(), [1, 2, 8])
    np.testing.assert_allclose(
        curve.get_ydata(), [load_level.ttft.p50 for load_level in result.load_levels if load_level.counts]
    )
    crosses = [line for line in ttft.lines if line.get_marker() == "x"]
    assert {line.get_xdata()[0] for line in crosses} == {4}
    assert any(np.allclose(line.get_ydata(), 150.0) for line in ttft.lines)  # the limit
    assert "4 requests/s invalid" in pictures["sweep-latency"].caption


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "result",
    [
        climbed([3]),
        climbed([1, 2, 3], axis="concurrency"),
        climbed([1, 64], invalid=(1, 64)),
        sweep([2, 4], lambda load: played(load, run_of([Answered(0.1 * i, status=Status.ERROR) for i in range(9)]))),
        sweep([2, 4], lambda load: played(load, run_of([Answered(0.1 * i, ((0.1 * i + 1, 1),)) for i in range(30)]))),
    ],
    ids=["one load level", "concurrency", "nothing valid", "nothing answered", "one token each"],
)
def test_odd_sweeps_are_drawn_all_the_same(result: Sweep, tmp_path: Path) -> None:
    """A warning would be an error here."""
    write_sweep(result, SLO, tmp_path)
    for picture in sweep_pictures(result, SLO):
        assert picture.alt
        assert png(picture)
    assert sweep_lines(result, SLO)
