"""The advice follows the cause: who had the cores when the client came late."""

from typing import Any

import numpy as np
import pytest

from loadgen.checks.limits import Limits
from loadgen.checks.shortage import what_held_back, what_helps
from loadgen.record import WorkerHealth
from tests.support.loadgen.runs import Answered, run_of


def _advice(cpu_share: list[float], host_busy: Any) -> str:
    worker = WorkerHealth(0, np.zeros(10), np.array(cpu_share))
    run = run_of([Answered(0.0, ((0.1, 1),))], workers=(worker,), settings={"host_busy": host_busy})
    return what_helps(run, Limits())


@pytest.mark.parametrize("host_busy", [None, {"mean": 0.2, "peak": 0.3}, {"mean": 1.0, "peak": 1.0}])
def test_a_worker_at_its_limit_wants_more_workers(host_busy: Any) -> None:
    assert _advice([0.1, 0.85, 0.2], host_busy).startswith("a worker used 85% of a core: more --workers")


@pytest.mark.parametrize("host_busy", [{"mean": 0.3, "peak": 0.95}, {"mean": 0.75, "peak": 0.8}])
def test_a_busy_machine_wants_quiet_not_workers(host_busy: Any) -> None:
    advice = _advice([0.01, 0.04], host_busy)
    assert "--workers" not in advice
    assert "the workers used 4% of a core" in advice
    assert f"{host_busy['peak']:.0%} busy in the worst second" in advice
    assert "other work on it" in advice


def test_where_nobody_is_short_of_cpu_bursts_and_limits_are_named() -> None:
    advice = _advice([0.04], {"mean": 0.1, "peak": 0.2})
    assert "neither the workers (4% of a core at most) nor this machine" in advice
    assert "due at one moment" in advice


def test_a_machine_that_does_not_say_how_busy_it_was_is_suspected() -> None:
    assert "more of them would not help: look for other work" in _advice([0.04], None)


def test_a_run_too_short_for_a_figure_gets_all_the_advice_there_is() -> None:
    assert _advice([], None) == "more --workers, free cores, or a lower rate"


def _held_back(host_busy: Any) -> str:
    return what_held_back(run_of([Answered(0.0, ((0.1, 1),))], settings={"host_busy": host_busy}))


@pytest.mark.parametrize("host_busy", [{"mean": 0.3, "peak": 0.95}, {"mean": 0.75, "peak": 0.8}])
def test_a_busy_machine_is_named_before_caps_and_proxies(host_busy: Any) -> None:
    why = _held_back(host_busy)
    assert why.startswith(f"this machine was {host_busy['peak']:.0%} busy in the worst second")
    assert why.index("run from another machine") < why.index("a cap on streams")


@pytest.mark.parametrize("host_busy", [None, {"mean": 0.2, "peak": 0.3}])
def test_a_machine_that_was_not_busy_is_not_blamed(host_busy: Any) -> None:
    assert _held_back(host_busy).startswith("a cap on streams or connections, or a proxy")
