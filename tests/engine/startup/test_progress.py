"""Progress of the start: reported at once, logged by phase, shown on a terminal."""

import logging
import os
import pty
import threading

import pytest

from chairlift.service.logs import TerminalHandler
from engine.startup.progress import SILENCE_S, StartupProgress
from tests.hang import HANG_S


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("engine.startup.progress.time.monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_phase_is_reported_at_once_and_its_progress_at_most_ten_times_a_second(clock: Clock) -> None:
    told: list[str] = []
    startup = StartupProgress(told.append)
    startup.begin("weights", "loading weights")
    for percent in range(100):
        clock.now_s += 0.01
        startup.update(f"loading weights {percent} %")
    assert told[0] == "loading weights"
    assert 9 <= len(told) - 1 <= 10
    startup.begin("warm-up", "warming up")
    assert told[-1] == "warming up"


def test_the_breakdown_adds_up_phases_of_the_same_name(clock: Clock) -> None:
    startup = StartupProgress(began_at_s=98.0)
    for phase, seconds in (("kernels", 3.0), ("weights", 2.0), ("kernels", 1.0)):
        startup.begin(phase, phase)
        clock.now_s += seconds
    assert startup.end() == "8.0 s (kernels 4.0, weights 2.0)"


def test_counts_are_reported(clock: Clock) -> None:
    told: list[str] = []
    startup = StartupProgress(told.append)
    for _ in startup.count(iter("abc"), desc="recording CUDA graphs", total=3):
        clock.now_s += 1.0
    assert told == ["recording CUDA graphs 1 of 3", "recording CUDA graphs 2 of 3", "recording CUDA graphs 3 of 3"]


def test_a_phase_that_lasts_is_logged_every_few_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.startup.progress._TICK_S", 0.001)
    logged = threading.Event()
    monkeypatch.setattr(caplog.handler, "emit", lambda record: (caplog.records.append(record), logged.set()))
    told: list[str] = []
    with caplog.at_level(logging.INFO), StartupProgress(told.append).watched():
        pass  # nothing is being done yet, so nothing is said
    assert not caplog.records
    startup = StartupProgress(told.append)
    with caplog.at_level(logging.INFO), startup.watched():
        clock.now_s += 7.0
        startup.begin("kernels", "loading CPU kernels")
        startup.update("compiling CPU kernels, 3 of 47")
        for _ in range(2):
            clock.now_s += SILENCE_S
            assert logged.wait(HANG_S)
            logged.clear()
    assert [record.getMessage() for record in caplog.records] == [
        "compiling CPU kernels, 3 of 47 ... 5 s",
        "compiling CPU kernels, 3 of 47 ... 10 s",
    ]
    assert told == ["loading CPU kernels", "compiling CPU kernels, 3 of 47"]  # too soon after the first, but not lost


def test_on_a_terminal_one_line_is_written_over_and_nothing_is_logged_of_it(clock: Clock) -> None:
    shown: list[str] = []
    startup = StartupProgress(show=shown.append)
    with startup.watched():
        startup.begin("weights", "loading weights")
        clock.now_s += 7.0
        startup.update("loading weights 43 %")
    assert "loading weights 43 % ... 7 s" in shown
    assert shown[-1] == ""


def test_log_lines_go_above_the_line_that_is_shown() -> None:
    expected = b"\x1b[Kloading weights\r\x1b[Ka line\r\nloading weights\r\x1b[K\r"
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream, os.fdopen(leader, "rb", buffering=0) as screen:
        handler = TerminalHandler(stream)
        handler.show("loading weights")
        handler.emit(logging.LogRecord("engine", logging.INFO, "", 0, "a line", None, None))
        handler.show("")
        written = b""
        while len(written) < len(expected):  # a terminal hands on in pieces
            written += screen.read(1000)
    assert written == expected
