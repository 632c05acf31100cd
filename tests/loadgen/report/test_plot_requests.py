"""Which requests are drawn, and as what."""

import numpy as np
import pytest

from loadgen.measure.metrics import measure
from loadgen.measure.samples import samples_of
from loadgen.record import RunData, Status
from loadgen.report.palette import BLUE, GREY, INK, ORANGE, RED, TEAL, VIOLET
from loadgen.report.plot_requests import requests_in_time
from loadgen.report.plot_style import Picture
from tests.support.loadgen.runs import Answered, run_of, synthetic_run


def _picture(run: RunData) -> Picture:
    return requests_in_time(run, measure(run), samples_of(run))


def _lines(picture: Picture) -> dict[str, list[tuple[float, float, float]]]:
    """(row, from, until) by colour."""
    (axes,) = picture.figure.axes
    found: dict[str, list[tuple[float, float, float]]] = {}
    for line in axes.lines:
        x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
        drawn = zip(y[::3].tolist(), x[::3].tolist(), x[1::3].tolist(), strict=True)
        found.setdefault(str(line.get_color()), []).extend(drawn)
    return found


def test_each_second_of_a_request_has_its_colour() -> None:
    """The median gap is 50 ms, so that 190 ms are no stall and 210 ms are one."""
    run = run_of(
        [
            Answered(0.0, ((1.0, 1), (1.05, 1), (1.1, 1), (2.0, 1)), sent_s=0.5, queued_us=200_000, prefill_us=300_000),
            Answered(0.1, ((1.0, 1), (1.05, 1), (1.1, 1), (1.15, 1), (1.34, 1), (1.55, 1))),
            Answered(0.2, status=Status.ERROR, sent_s=0.3, ended_s=0.9, error="no"),
            Answered(0.3, status=Status.DROPPED),
        ]
    )
    lines = _lines(_picture(run))
    expected = {
        GREY: [(0, 0.0, 0.5), (2, 0.2, 0.3)],
        ORANGE: [(0, 0.5, 0.7), (1, 0.1, 1.0)],
        TEAL: [(0, 0.7, 1.0)],
        BLUE: [(0, 1.0, 2.0), (1, 1.0, 1.55)],
        RED: [(0, 1.1, 2.0), (1, 1.34, 1.55)],
        INK: [(2, 0.3, 0.9)],
    }
    assert lines.keys() == expected.keys()
    for colour, drawn in expected.items():
        assert lines[colour] == [pytest.approx(line) for line in drawn]


def test_what_the_servers_account_leaves_of_ttft_is_drawn_behind_it() -> None:
    told = Answered(0.0, ((1.0, 1), (2.0, 1)), sent_s=0.25, queued_us=125_000, prefill_us=250_000)
    beyond = Answered(0.5, ((1.0, 1), (2.0, 1)), queued_us=125_000, prefill_us=625_000)
    picture = _picture(run_of([told, beyond]))
    lines = _lines(picture)
    assert lines[TEAL] == [pytest.approx((0, 0.375, 0.625)), pytest.approx((1, 0.625, 1.0))]
    assert lines[VIOLET] == [pytest.approx((0, 0.625, 1.0))]


def test_lines_too_short_to_read_begin_when_their_request_was_due() -> None:
    """Answers of 50 ms, two a second; as long as they are far apart, it does not matter when they were due."""
    light = run_of([Answered(i / 2, ((i / 2 + 0.01, 1), (i / 2 + 0.05, 1)), sent_s=i / 2 + 0.005) for i in range(60)])
    picture = _picture(light)
    lines = _lines(picture)
    assert lines[GREY] == [pytest.approx((i, 0.0, 0.005)) for i in range(60)]
    assert lines[BLUE] == [pytest.approx((i, 0.01, 0.05)) for i in range(60)]
    (axes,) = picture.figure.axes
    assert axes.get_xlim() == pytest.approx((0.0, 0.05))


def test_lines_that_can_be_read_lie_in_the_time_of_the_run() -> None:
    heavy = run_of([Answered(i / 2, ((i / 2 + 1.0, 1), (i / 2 + 4.0, 1))) for i in range(60)])
    picture = _picture(heavy)
    assert _lines(picture)[BLUE] == [pytest.approx((i, i / 2 + 1.0, i / 2 + 4.0)) for i in range(60)]


def test_all_of_a_small_run_are_drawn_and_a_part_of_a_large_one_is_said() -> None:
    assert _picture(synthetic_run(120)).caption == "All requests."
    crowded = [Answered(0.01 * i if 300 <= i < 340 else float(i), ((1.0 * i + 5.0, 1),)) for i in range(600)]
    picture = _picture(run_of(sorted(crowded, key=lambda one: one.due_s)))
    assert picture.caption.startswith("Requests ")
    assert "of 600: those around the moment when most were in the system" in picture.caption


def test_the_busiest_moment_is_in_the_picture() -> None:
    """Four hundred single requests, and forty at once from second 300 on."""
    played = [Answered(float(i), ((i + 0.1, 1), (i + 0.2, 1))) for i in range(300)]
    played += [Answered(300.0, ((301.0, 1), (309.0, 1))) for _ in range(40)]
    played += [Answered(310.0 + i, ((i + 310.1, 1), (i + 310.2, 1))) for i in range(100)]
    lines = _lines(_picture(run_of(played)))
    rows = {int(row) for row, _, _ in lines[BLUE]}
    assert set(range(300, 340)) <= rows
    assert len(rows) == 120
