"""A server that falls behind is told from one that only wavers."""

import numpy as np
import pytest

from loadgen.checks.saturation import Saturation, Trend, saturation, trend
from loadgen.measure.metrics import measure
from loadgen.measure.samples import samples_of
from tests.support.loadgen.runs import Answered, run_of, synthetic_run


def _of(run: object) -> Saturation | None:
    return saturation(run, samples_of(run), measure(run).steady.span)  # type: ignore[arg-type]


def test_a_queue_that_grows_is_unstable() -> None:
    """One server of 60 ms for requests every 50 ms: each waits 10 ms longer than the one before it."""
    found = _of(run_of([Answered(0.05 * i, ((0.06 * (i + 1), 1), (0.06 * (i + 1), 1))) for i in range(400)]))
    assert found is not None
    assert found.unstable
    assert found.ttft.rise == pytest.approx(2.0, rel=0.1)  # from almost nothing to twice its mean
    assert found.in_system.t > 10


@pytest.mark.parametrize("seed", range(40))
def test_a_steady_server_is_not(seed: int) -> None:
    found = _of(synthetic_run(400, rate=20.0, seed=seed, jitter=0.5))
    assert found is not None
    assert not found.unstable


def test_one_trend_alone_is_not_enough() -> None:
    """Latency doubles for a reason of its own while the load stays: prompts that get longer, say."""
    found = _of(
        run_of([Answered(0.05 * i, ((0.05 * i + 0.01 + 1e-4 * i, 1), (0.05 * i + 1.0, 1))) for i in range(400)])
    )
    assert found is not None
    assert found.ttft.up
    assert not found.in_system.up
    assert not found.unstable


@pytest.mark.parametrize("seed", range(10))
def test_a_slope_and_its_t_are_those_of_the_correlation(seed: int) -> None:
    """t = r * sqrt((n - 2) / (1 - r^2)), and the slope is r times the ratio of the spreads."""
    draw = np.random.default_rng(seed)
    x, y = np.linspace(3.0, 9.0, 15), draw.random(15) + draw.normal() * np.linspace(0.0, 1.0, 15) + 2.0
    r = float(np.corrcoef(x, y)[0, 1])
    found = trend(x, y)
    assert found.t == pytest.approx(r * np.sqrt(13 / (1 - r**2)))
    assert found.rise == pytest.approx(r * y.std() / x.std() * 6.0 / y.mean())


def test_lines_without_scatter() -> None:
    x = np.arange(12.0)
    assert trend(x, np.full(12, 5.0)) == (0.0, 0.0)
    assert trend(x, x + 1).t > 1e6
    assert trend(x, -x + 20).t < -1e6


@pytest.mark.parametrize(
    ("rise", "t", "up"), [(0.3, 3.0, True), (0.3, 2.8, False), (0.24, 50.0, False), (-0.5, -9.0, False)]
)
def test_a_trend_counts_when_it_is_both_large_and_significant(rise: float, t: float, up: bool) -> None:
    assert Trend(rise, t).up == up


def test_too_few_requests_show_no_trend() -> None:
    assert _of(synthetic_run(30)) is None
