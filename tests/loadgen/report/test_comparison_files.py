"""The reports of a comparison: a page that needs nothing else, its pictures and its figures."""

import json
from pathlib import Path

import pytest

from loadgen.checks.selfcheck import judge
from loadgen.comparison.compare import Side, compare
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.record import RunData, Status
from loadgen.report.comparison_files import write_comparison
from loadgen.report.plot_comparison import comparison_pictures
from loadgen.report.plot_style import png
from tests.support.loadgen.pages import Page
from tests.support.loadgen.runs import Answered, run_of, synthetic_run


def side(label: str, *runs: RunData) -> Side:
    return Side(label, runs, tuple(judge(run, measure(run)) for run in runs))


def test_everything_is_written(tmp_path: Path) -> None:
    sides = [
        side("static", synthetic_run(80, noise_seed=1)),
        side("continuous", synthetic_run(80, noise_seed=2, ttft_ms=40)),
    ]
    options = MeasureOptions(slo={"ttft": 100.0})
    paths = write_comparison(compare(sides, options, resamples=50), sides, tmp_path, about={"static": "runs/1"})
    assert {path.name for path in paths} == {
        "comparison.json", "comparison.html", "comparison-ratios.png", "comparison-cdf.png", "comparison-timeline.png",
    }  # fmt: skip
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths if path.suffix == ".png")
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert document["schema"] == "loadgen.comparison/v1"
    assert document["versus"][0]["figures"]["ttft_p50"]["effect"] < 0.7
    page = (tmp_path / "comparison.html").read_text()
    assert "continuous against static" in page
    assert "FORCED" not in page
    assert "runs/1" in page


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    sides = [
        side(label, *(synthetic_run(40, noise_seed=shift + k) for k in range(2)))
        for label, shift in (("a", 0), ("b", 5), ("c", 9))
    ]
    write_comparison(compare(sides, resamples=20), sides, tmp_path)
    Page((tmp_path / "comparison.html").read_text()).require_self_contained()


def test_what_was_forced_is_at_the_top(tmp_path: Path) -> None:
    sides = [side("a", synthetic_run(40)), side("b", synthetic_run(40, seed=9))]
    write_comparison(compare(sides, force=True, resamples=20), sides, tmp_path)
    page = (tmp_path / "comparison.html").read_text()
    assert page.index("FORCED") < page.index("<table>")
    assert "input_tokens differs in" in page


def test_labels_are_text_however_they_look(tmp_path: Path) -> None:
    label = '<script>alert("x")</script> & $\\frac{1}{2}$ a very long label that goes on and on'
    sides = [side(label, synthetic_run(40, noise_seed=1)), side("b", synthetic_run(40, noise_seed=2))]
    write_comparison(compare(sides, resamples=20), sides, tmp_path)
    assert "<script>" not in (tmp_path / "comparison.html").read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "runs",
    [
        [run_of([Answered(0.0, ((1.0, 1),))]), run_of([Answered(0.0, ((2.0, 1),))])],
        [run_of([Answered(0.1 * i, status=Status.ERROR, error="no") for i in range(30)])] * 2,
        [run_of([Answered(0.0, ((1.0 + i, 2), (2.0 + i, 3))) for i in range(30)])] * 2,
        [run_of([])] * 2,
    ],
    ids=["one request", "nothing answered", "all at once", "no requests"],
)
def test_odd_runs_are_drawn_all_the_same(runs: list[RunData], tmp_path: Path) -> None:
    """Forced or not; a warning would be an error here."""
    sides = [side("a", runs[0]), side("b", runs[1])]
    comparison = compare(sides, force=True, resamples=20)
    write_comparison(comparison, sides, tmp_path)
    for picture in comparison_pictures(comparison, sides):
        assert picture.alt
        assert png(picture)
