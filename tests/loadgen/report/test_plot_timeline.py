"""A percentile is drawn only where there are requests enough for it; every request has its dot."""

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import StepPatch

from loadgen.measure.metrics import measure
from loadgen.measure.samples import samples_of
from loadgen.record import RunData
from loadgen.report.palette import BLUE, ORANGE
from loadgen.report.plot_style import Picture
from loadgen.report.plot_timeline import timeline
from tests.support.loadgen.runs import Answered, run_of


def _picture(run: RunData) -> Picture:
    return timeline(run, measure(run), samples_of(run))


def _steps(picture: Picture, colour: str) -> list[tuple[float, float, float]]:
    """(from, until, TTFT) of the curve of a colour in the last row."""
    for patch in picture.figure.axes[3].patches:
        if isinstance(patch, StepPatch) and _hex(patch.get_edgecolor()) == colour:
            values, edges, _ = patch.get_data()
            return list(zip(edges[:-1], edges[1:], values, strict=True))
    return []


def _hex(colour: Any) -> str:
    return to_hex(colour)


def _steady(count: int, rate: float) -> RunData:
    """Request i is due at i / rate; its first token comes after 100 ms, of every tenth after one second."""
    return run_of([Answered(i / rate, ((i / rate + (1.0 if i % 10 == 9 else 0.1), 1),)) for i in range(count)])


def test_a_dot_per_request_where_it_was_due() -> None:
    (dots,) = _picture(_steady(30, 2.0)).figure.axes[3].collections
    at = np.asarray(dots.get_offsets())
    assert at[:, 0].tolist() == pytest.approx([i / 2 for i in range(30)])
    assert at[:, 1].tolist() == pytest.approx([1000.0 if i % 10 == 9 else 100.0 for i in range(30)])


@pytest.mark.parametrize(
    ("count", "tail", "expected"),
    [
        (19, None, {"p50": 0}),
        (60, "p90", {"p50": 20, "p90": 20}),
        (300, "p95", {"p95": 40}),
        (1200, "p99", {"p99": 200}),
    ],
)
def test_every_bin_of_a_percentile_has_requests_enough(count: int, tail: str | None, expected: dict[str, int]) -> None:
    run = _steady(count, 5.0)
    picture = _picture(run)
    drawn = {"p50": _steps(picture, BLUE), tail: _steps(picture, ORANGE)}
    due = [float(at) for at in run.workload.arrival_s]
    for name, least in expected.items():
        assert bool(drawn[name]) == bool(least)
        for from_s, until_s, _ in drawn[name]:
            assert sum(from_s <= at < until_s for at in due) >= least


def test_the_steps_are_the_percentiles_of_the_requests_due_then() -> None:
    """Slow for the first half of the run, quick for the second, but for every fifth request, which is slower still."""
    ttft_s = [5.0 if i % 5 == 0 else 2.0 if i < 200 else 0.1 for i in range(400)]
    run = run_of([Answered(i / 10, ((i / 10 + ttft_s[i], 1),)) for i in range(400)])
    early = [value for _, until_s, value in _steps(_picture(run), BLUE) if until_s <= 20.0]
    late = [value for from_s, _, value in _steps(_picture(run), BLUE) if from_s >= 20.0]
    assert early == pytest.approx([2000.0] * len(early))
    assert late == pytest.approx([100.0] * len(late))
    assert len(early) >= 5
    assert len(late) >= 5
    tail = [value for _, _, value in _steps(_picture(run), ORANGE)]
    assert tail == pytest.approx([5000.0] * len(tail))


@pytest.mark.parametrize("run", [run_of([]), run_of([Answered(0.0, ((0.0, 1),))])], ids=["empty", "no time at all"])
def test_nothing_to_draw_is_an_empty_row(run: RunData) -> None:
    picture = _picture(run)
    assert not _steps(picture, BLUE)
    assert not picture.figure.axes[3].collections
