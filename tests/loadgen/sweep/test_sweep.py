"""Ladders end when there is nothing more to see, and bisection finds the knee, noise or not."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from loadgen.checks.finding import Level
from loadgen.checks.selfcheck import judge
from loadgen.errors import TargetError
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.measure.quantiles import Distribution
from loadgen.record import Status
from loadgen.sweep.load_level import LoadLevel, load_level_of
from loadgen.sweep.sweep import sweep
from tests.support.loadgen.runs import synthetic_run

NOTHING = Distribution(0, math.nan, math.nan, math.nan, math.nan, ((50.0, math.nan), (99.0, math.nan)))
OFFERED = 100_000  # so that rounding to whole requests is nothing


class Server:
    """Keeps limits for ever fewer requests around its knee, and delivers no more than its capacity."""

    def __init__(
        self,
        *,
        knee: float = 10.0,
        capacity: float = 16.0,
        noise: float = 0.0,
        level: Callable[[float, int], Level] = lambda load, take: "VALID",
        fails_at: float = math.inf,
        stopped_at: float = math.inf,
    ) -> None:
        self.played: list[float] = []
        self._knee, self._capacity, self._noise, self._level = knee, capacity, noise, level
        self._fails_at, self._stopped_at = fails_at, stopped_at
        self._rng = np.random.default_rng(0)

    def attainment(self, load: float) -> float:
        """0.9 at the knee."""
        return 1 / (1 + (load / self._knee) ** 8 / 9)

    def run_once(self, load: float) -> LoadLevel:
        self.played.append(load)
        if load >= self._fails_at:
            raise TargetError("the server is gone")
        good = round(OFFERED * min(1.0, max(0.0, self.attainment(load) + self._noise * self._rng.standard_normal())))
        served = min(load, self._capacity)
        return LoadLevel(
            load=load, level=self._level(load, self.played.count(load)), reasons=(), folder=f"rate-{load:g}",
            offered=OFFERED, good=good, goodput_per_s=served * good / OFFERED, ttft=NOTHING, tpot=NOTHING, e2e=NOTHING,
            normalized=NOTHING, requests_per_s=served, output_tokens_per_s=100 * served, interactivity=50.0,
            interrupted=load >= self._stopped_at,
        )  # fmt: skip


def test_load_levels_are_run_from_below_and_the_answers_read_off() -> None:
    server = Server()
    found = sweep([1, 2, 4, 8, 12], server.run_once, targets=(0.9, 0.99))
    assert server.played == [1, 2, 4, 8, 12]
    assert [(one.target, one.load, one.limit) for one in found.answers] == [(0.9, 8, 12), (0.99, 4, 8)]
    assert (found.stopped, found.failure) == ("", "")


def test_a_saturated_ladder_is_left() -> None:
    server = Server(capacity=12.0)
    found = sweep([4, 8, 16, 32, 64, 128], server.run_once, targets=(0.9,))
    assert server.played == [4, 8, 16, 32]
    assert found.stopped.startswith("saturated at 32 requests/s: 1,200 tokens/s after 1,200 at 16")
    assert (
        sweep([4, 8, 16, 32, 64], Server(capacity=12.0).run_once, targets=(0.9,), keep_going=True).load_levels[-1].load
        == 64
    )


def test_without_limits_throughput_alone_says_when_to_stop() -> None:
    assert [
        load_level.load for load_level in sweep([4, 8, 16, 32, 64], Server(capacity=12.0).run_once).load_levels
    ] == [
        4,
        8,
        16,
        32,
    ]


def test_a_server_that_keeps_its_limits_is_not_saturated() -> None:
    """Its answers are short, so tokens per second hardly grow: all requests are good all the same."""
    server = Server(knee=1000.0, capacity=4.0)
    assert len(sweep([4, 8, 16, 32], server.run_once, targets=(0.9,)).load_levels) == 4


def test_the_end_of_the_ladder_is_not_called_left_early() -> None:
    assert sweep([8, 16, 32], Server(capacity=12.0).run_once).stopped == ""


@pytest.mark.parametrize("target", [0.9, 0.99])
def test_bisection_finds_the_knee_of_a_monotone_curve(target: float) -> None:
    server = Server(capacity=100.0)
    found = sweep([1, 4, 16, 64], server.run_once, targets=(target,), bisect=True, precision=0.02, max_probes=12)
    (answer,) = found.answers
    truth = 10.0 * (9 * (1 / target - 1)) ** (1 / 8)
    assert answer.load is not None
    assert answer.limit is not None
    assert answer.load <= truth * 1.001
    assert answer.limit >= truth * 0.999
    assert answer.limit / answer.load <= 1.0201
    assert [load_level.load for load_level in found.load_levels] == sorted(server.played)


@pytest.mark.parametrize("seed", range(20))
def test_bisection_comes_near_the_knee_of_a_noisy_curve(seed: int) -> None:
    server = Server(capacity=100.0, noise=0.03)
    server._rng = np.random.default_rng(seed)
    found = sweep([1, 2, 4, 8, 16, 32], server.run_once, targets=(0.9,), bisect=True)
    load = found.answers[0].load
    assert load is not None
    assert 0.9 - 0.09 <= server.attainment(load) <= 0.9 + 0.09  # within three sigma of the target


def test_bisection_goes_below_the_ladder_when_nothing_on_it_is_good() -> None:
    found = sweep([64, 128], Server(capacity=1000.0).run_once, targets=(0.9,), bisect=True)
    assert found.answers[0].load == pytest.approx(10.0, rel=0.06)


def test_bisection_of_concurrency_ends_at_neighbours() -> None:
    server = Server()
    found = sweep([1, 32], server.run_once, axis="concurrency", targets=(0.9,), bisect=True)
    assert all(load == int(load) for load in server.played)
    assert (found.answers[0].load, found.answers[0].limit) == (10, 11)


def test_bisection_gives_up_after_its_probes() -> None:
    server = Server(capacity=100.0)
    sweep([1, 64], server.run_once, targets=(0.9, 0.99), bisect=True, precision=1e-9, max_probes=3)
    assert len(server.played) == 2 + 2 * 3


def test_an_invalid_load_level_is_run_again() -> None:
    server = Server(level=lambda load, take: "INVALID" if load == 8 and take == 1 else "VALID")
    found = sweep([4, 8, 12], server.run_once, targets=(0.9,))
    assert server.played == [4, 8, 8, 12]
    assert [load_level.level for load_level in found.load_levels] == ["VALID", "INVALID", "VALID", "VALID"]
    assert found.answers[0].load == 8
    assert found.answers[0].proven


def test_an_invalid_load_level_that_stays_so_is_not_used() -> None:
    server = Server(level=lambda load, take: "INVALID" if load == 8 else "VALID")
    found = sweep([4, 8, 12], server.run_once, targets=(0.9,), retries=2)
    assert server.played == [4, 8, 8, 8, 12]
    assert (found.answers[0].load, found.answers[0].limit, found.answers[0].proven) == (4, 8, False)


def test_two_invalid_load_levels_end_the_climb() -> None:
    server = Server(level=lambda load, take: "INVALID" if load >= 8 else "VALID")
    found = sweep([4, 8, 12, 16], server.run_once, targets=(0.9,), retries=0)
    assert server.played == [4, 8, 12]
    assert found.stopped.startswith("two load levels in a row are INVALID, up to 12 requests/s")
    assert (
        len(
            sweep(
                [4, 8, 12, 16], Server(level=lambda load, take: "INVALID").run_once, keep_going=True, retries=0
            ).load_levels
        )
        == 4
    )


def test_a_server_that_goes_away_leaves_what_was_run() -> None:
    server = Server(fails_at=8)
    found = sweep([2, 4, 8, 16], server.run_once, targets=(0.9,), bisect=True)
    assert found.failure == "at 8 requests/s: the server is gone"
    assert [load_level.load for load_level in found.load_levels] == [2, 4]
    assert found.answers[0].load == 4
    assert not found.interrupted


def test_a_server_that_was_never_there_is_an_error() -> None:
    with pytest.raises(TargetError, match="gone"):
        sweep([2, 4], Server(fails_at=1).run_once)


def test_ctrl_c_ends_the_sweep_and_the_broken_load_level_is_not_used() -> None:
    server = Server(stopped_at=4)
    found = sweep([2, 4, 8], server.run_once, targets=(0.9,), bisect=True)
    assert server.played == [2, 4]
    assert found.interrupted
    assert found.failure == "stopped at 4 requests/s"
    assert found.answers[0].load == 2


def test_ctrl_c_between_two_load_levels_keeps_those_that_were_run() -> None:
    server = Server()

    def run_once(load: float) -> LoadLevel:
        if load == 8:
            raise KeyboardInterrupt
        return server.run_once(load)

    found = sweep([2, 4, 8, 16], run_once, targets=(0.9,), bisect=True)
    assert server.played == [2, 4]
    assert found.interrupted
    assert found.failure == "stopped before 8 requests/s"
    assert found.answers[0].load == 4
    with pytest.raises(KeyboardInterrupt):
        sweep([8, 16], run_once)


def test_a_load_level_is_what_its_report_says() -> None:
    run = synthetic_run(120, outcomes={Status.ERROR: 12})
    metrics = measure(run, MeasureOptions(slo={"ttft": 120.0}))
    verdict = judge(run, metrics)
    load_level = load_level_of(20.0, run, metrics, verdict, "rate-20")
    assert (load_level.level, load_level.counts) == ("INVALID", False)
    assert "12 errors" in load_level.reasons[0]
    assert load_level.attainment == metrics.steady.goodput.attainment
    assert load_level.ttft == metrics.steady.latencies.ttft
    assert load_level.interactivity == pytest.approx(1000 / load_level.tpot.p50)
    assert not replace(load_level, level="VALID", interrupted=True).counts
    assert math.isnan(replace(load_level, offered=0).attainment)
