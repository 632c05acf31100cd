from dataclasses import replace

import pytest

import loadgen.run.calibrate
from loadgen.errors import TargetError
from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.running import mock_in_processes
from loadgen.run.calibrate import Trial, calibrate, recovered_ms, try_load
from tests.support.loadgen.runs import Answered, healthy, run_of

GOOD = Trial(num_streams=10, delivered=1.0, gap_error_ms=1.0, lag_ms=1.0)


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, ()),
        ({"delivered": 0.97, "gap_error_ms": 5.0, "lag_ms": 5.0}, ()),
        ({"delivered": 0.9}, ("fewer than 97% seen in time",)),
        ({"gap_error_ms": 6.0}, ("gaps off by more than 5 ms",)),
        ({"lag_ms": 8.0, "delivered": 0.9}, ("fewer than 97% seen in time", "event loop late by more than 5 ms")),
    ],
)
def test_a_load_is_good_if_the_client_kept_up_and_says_where_it_did_not(
    change: dict[str, float], broken: tuple[str, ...]
) -> None:
    trial = replace(GOOD, **change)  # type: ignore[arg-type]
    assert trial.is_good == (not broken)
    assert trial.broken == broken
    assert str(trial).endswith(f"too much: {', '.join(broken)}" if broken else "kept up")
    assert trial.messages_per_s == 1000


def answer(due_s: float, first_s: float, gap_s: float, count: int) -> Answered:
    """A message at a time."""
    return Answered(due_s, tuple((due_s + first_s + gap_s * index, 1) for index in range(count)))


@pytest.mark.parametrize(
    ("first_s", "gap_s", "delivered", "gap_error_ms"),
    [(0.05, 0.01, 1.0, 0.0), (0.05, 0.02, 0.5, 10.0), (1.5, 0.01, 1.25 / 7.6, 0.0)],
)
def test_a_load_level_is_what_was_seen_in_time(
    first_s: float, gap_s: float, delivered: float, gap_error_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One second is held, from 1.05 s to 2 s; eight streams begin within the first."""
    held = [answer(index / 8, first_s, gap_s, 300) for index in range(8)]
    workers = [healthy(0, 4.0, lag_ms=0.5), healthy(1, 4.0, lag_ms=2.5)]
    monkeypatch.setattr(loadgen.run.calibrate, "run_workload", lambda *_: run_of(held, workers=workers))
    trial = try_load("grpc", "grpc://nowhere:1", 8, 2, 1.0)
    assert (trial.num_streams, trial.lag_ms) == (8, 2.5)
    assert trial.gap_error_ms == pytest.approx(gap_error_ms, abs=1e-3)
    assert trial.delivered == pytest.approx(delivered, abs=0.02)


def test_latencies_that_are_off_are_found_to_be_off_by_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [answer(index / 5, 0.053, 0.0105, 20) for index in range(8)]
    monkeypatch.setattr(loadgen.run.calibrate, "run_workload", lambda *_: run_of(held))
    assert recovered_ms("http", 1.0) == pytest.approx((3.0, 0.5, 0.5), abs=1e-3)


def test_a_light_load_is_run_against_servers_of_its_own() -> None:
    with mock_in_processes("grpc", MockBehaviour(ttft_s=0.05, itl_s=0.01)) as url:
        trial = try_load("grpc", url, 8, 1, 0.5)
    assert trial.num_streams == 8
    assert trial.delivered > 0


def climb(
    monkeypatch: pytest.MonkeyPatch, limit: int, bad_luck: frozenset[int] = frozenset(), busy: float | None = 0.0
) -> list[str]:
    """Calibrates a host that keeps up to `limit` streams, and fails the tries of these numbers."""
    tries: list[int] = []

    def tried(protocol: str, url: str, num_streams: int, num_workers: int, hold_s: float) -> Trial:
        tries.append(num_streams)
        return Trial(num_streams, 1.0 if num_streams <= limit and len(tries) not in bad_luck else 0.5, 1.0, 1.0)

    monkeypatch.setattr(loadgen.run.calibrate, "try_load", tried)
    monkeypatch.setattr(loadgen.run.calibrate, "_null_rate", lambda: 1e6)
    monkeypatch.setattr(loadgen.run.calibrate, "recovered_ms", lambda protocol, hold_s: (0.5, 0.1, 0.1))
    monkeypatch.setattr(loadgen.run.calibrate, "this_host", lambda: ("host", 2, "3.11.0"))
    monkeypatch.setattr(loadgen.run.calibrate, "busy_now", lambda: busy)
    lines: list[str] = []
    ceiling = calibrate("grpc", say=lines.append)
    assert ceiling.messages_per_s == ceiling.messages_per_s_per_worker
    assert (ceiling.ttft_error_ms, ceiling.host, ceiling.null_messages_per_s) == (0.5, "host", 1e6)
    return [str(ceiling.messages_per_s), *lines]


def test_the_ceiling_is_the_last_load_that_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = [16, 22, 31, 44, 61, 86]
    assert climb(monkeypatch, 50)[0] == "4400.0"
    assert climb(monkeypatch, 86)[0] == "8600.0"
    lines = climb(monkeypatch, 61)
    assert [line.split()[2] for line in lines[2:-1]] == [f"{100 * load}" for load in (*loads, 86, 86)]


def test_a_neighbours_moment_of_work_does_not_end_the_climb(monkeypatch: pytest.MonkeyPatch) -> None:
    assert climb(monkeypatch, 50, frozenset({1, 3, 4}))[0] == "4400.0"


@pytest.mark.parametrize(("busy", "warned"), [(None, False), (0.05, False), (0.6, True)])
def test_a_host_that_is_busy_before_the_start_is_warned_of(
    busy: float | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = climb(monkeypatch, 50, busy=busy)[1]
    assert first.startswith("warning: these 2 cores are 60% busy before anything is started") == warned


def test_a_host_that_keeps_up_with_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="too busy to be calibrated"):
        climb(monkeypatch, 10)
