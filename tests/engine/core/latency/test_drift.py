"""What is expected of the next step from the residuals of the last ones."""

import random
from collections import deque
from statistics import fmean

import pytest

from engine.core.latency.drift import Drift


def errors_of(
    correlation: float, *, deviation: float = 0.1, lag: int = 1, num_steps: int = 20_000
) -> tuple[float, float]:
    """Returns the mean squared error of predictions, with drift and without, of steps whose speeds are correlated.

    Args:
        correlation: of the relative residuals of successive steps, a Gaussian process.
        deviation: their standard deviation.
        lag: steps that are planned before the result of the one before is known.
    """
    rng = random.Random(7)
    drift, residual = Drift(), 0.0
    planned: deque[tuple[float, float]] = deque((1.0, 0.0) for _ in range(lag))
    squares: list[tuple[float, float]] = []
    for _ in range(num_steps):
        residual = correlation * residual + (1 - correlation**2) ** 0.5 * rng.gauss(0.0, deviation)
        factor, known = planned.popleft()
        squares.append(((1.0 + residual - factor) ** 2, residual**2))
        drift.note(residual, known)
        planned.append((drift.factor, drift.residual))
    late = squares[500:]
    return fmean(with_drift for with_drift, _ in late), fmean(without for _, without in late)


@pytest.mark.parametrize(("correlation", "lag"), [(0.8, 1), (0.6, 1), (0.9, 2)])
def test_slow_spells_are_predicted_as_well_as_their_correlation_allows(correlation: float, lag: int) -> None:
    with_drift, without = errors_of(correlation, lag=lag)
    best = 1 - correlation ** (2 * lag)  # of an autoregression whose coefficient is known
    assert best <= with_drift / without <= best + 0.05


def test_independent_steps_are_predicted_hardly_worse() -> None:
    with_drift, without = errors_of(0.0, deviation=0.03)
    assert with_drift <= 1.03 * without


def test_one_slow_step_neither_bounds_the_next_ones_nor_hides_a_spell() -> None:
    drift = Drift()
    rng = random.Random(8)
    for _ in range(1000):
        drift.note(rng.gauss(0.0, 0.03), drift.residual)
    drift.note(5.0, drift.residual)
    assert drift.factor < 1.05
    for _ in range(30):
        drift.note(0.3, drift.residual)
    assert drift.factor > 1.15


def test_the_factor_is_bounded() -> None:
    drift = Drift()
    for _ in range(1000):
        drift.note(50.0, drift.residual)
        assert 0.5 <= drift.factor <= 2.0
    for _ in range(1000):
        drift.note(-0.99, drift.residual)
        assert 0.5 <= drift.factor <= 2.0
