"""The panel on a terminal, lines elsewhere, and neither more often than is of use."""

import io
import math

import pytest
from rich.console import Console

from loadgen.record import LiveView, Status, new_requests
from loadgen.report.live import History, line, live_panel, panel
from loadgen.report.live_figures import LiveFigures, Recent


def _figures(elapsed_s: float, tokens: int = 0, in_flight: int = 0, lag_ms: float = 0.5) -> LiveFigures:
    recent = Recent(80.0, 210.0)
    return LiveFigures(elapsed_s, 60.0, 1000, 312, 298, 2, in_flight, 0, tokens, recent, Recent(12.0, 15.0), lag_ms)


def _shown(what: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_token_rate_is_of_the_last_seconds_only() -> None:
    history = History()
    for step in range(41):  # 100 tok/s for 5 s, then 1,000
        at_s = step * 0.25
        history.add(_figures(at_s, tokens=round(100 * min(at_s, 5.0) + 1000 * max(0.0, at_s - 5.0))))
    assert history.tokens_per_s == pytest.approx(1000.0)


def test_the_sparkline_is_as_long_as_it_may_be_and_scaled_to_the_most() -> None:
    history = History()
    for count in [900] + [0] * 10 + [4] * 20 + [8] * 20:
        history.add(_figures(0.0, in_flight=count))
    assert history.sparkline == "▁" * 0 + "▅" * 20 + "█" * 20
    empty = History()
    empty.add(_figures(0.0))
    assert empty.sparkline == "▁"


def test_panel_and_line_show_the_same_figures() -> None:
    history = History()
    history.add(_figures(40.0, tokens=0, in_flight=3))
    figures = history.add(_figures(41.0, tokens=1340, in_flight=14))
    for text in (_shown(panel(figures, history)), line(figures, history)):
        for expected in ("41 s of 60 s", "312", "1,000", "298", "14", "80.0", "210.0", "12.0", "15.0", "1,340"):
            assert expected in text


def test_the_panel_fits_eighty_columns() -> None:
    history = History()
    huge = LiveFigures(
        4e4, 5e4, 10**6, 10**6, 10**6, 10**5, 10**4, 10**4, 10**9, Recent(98_765.4, 123_456.7), Recent(9e3, 9e4), 1e5
    )
    text = _shown(panel(history.add(huge), history))
    assert max(map(len, text.splitlines())) <= 80
    assert "123,457" in text


@pytest.mark.parametrize(
    ("lag_ms", "words"), [(0.5, "on time"), (11.0, "late"), (101.0, "too late"), (math.nan, "nothing sent lately")]
)
def test_the_light_of_the_schedule(lag_ms: float, words: str) -> None:
    history = History()
    assert words in _shown(panel(history.add(_figures(1.0, lag_ms=lag_ms)), history))


def test_without_a_terminal_a_line_comes_every_five_seconds() -> None:
    now_s = 0.0
    console = Console(file=io.StringIO(), width=60)
    with live_panel(console, clock=lambda: now_s) as on_progress:
        for step in range(100):
            now_s = step * 0.25
            on_progress(LiveView(now_s, new_requests(3), 25.0))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 5
    assert lines[2].startswith("10 s of 25 s: offered 0 of 3, done 0")


def test_on_a_terminal_a_panel_is_drawn_four_times_a_second_and_stays() -> None:
    now_s, draws = 0.0, 0
    console = Console(file=io.StringIO(), width=90, force_terminal=True)
    requests = new_requests(3)
    with live_panel(console, clock=lambda: now_s) as on_progress:
        for step in range(41):
            now_s = step * 0.1
            before = len(console.file.getvalue())  # type: ignore[attr-defined]
            on_progress(LiveView(now_s, requests, 5.0))
            draws += len(console.file.getvalue()) > before  # type: ignore[attr-defined]
            requests["status"] = Status.OK
    assert 12 <= draws <= 17
    assert "chairlift-loadgen  4 s of 5 s" in console.file.getvalue()  # type: ignore[attr-defined]
