from collections.abc import Callable

import numpy as np
import pytest

from loadgen.arrivals import (
    Step,
    at_once,
    constant,
    exponential_ramp,
    gamma,
    linear_ramp,
    on_off,
    stepped,
)
from loadgen.trace.stats import arrival_statistics

RANDOM = [
    pytest.param(lambda seed: gamma(10, 100, seed=seed), id="gamma"),
    pytest.param(lambda seed: on_off(10, 100, on_s=1, off_s=2, seed=seed), id="on_off"),
    pytest.param(lambda seed: linear_ramp(1, 9, 100, seed=seed), id="linear_ramp"),
    pytest.param(lambda seed: exponential_ramp(1, 9, 100, seed=seed), id="exponential_ramp"),
    pytest.param(lambda seed: stepped([Step(1, 5), Step(9, 5)], 100, seed=seed), id="stepped"),
]
Schedule = Callable[[int], np.ndarray]


def test_constant_arrivals_are_evenly_spaced_from_zero() -> None:
    assert constant(4.0, 5).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_at_once_is_all_at_zero() -> None:
    assert at_once(3).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("schedule", RANDOM)
def test_same_seed_same_schedule(schedule: Schedule) -> None:
    assert np.array_equal(schedule(3), schedule(3))
    assert not np.array_equal(schedule(3), schedule(4))


@pytest.mark.parametrize("schedule", RANDOM)
def test_schedules_ascend_from_zero_on(schedule: Schedule) -> None:
    for seed in range(20):
        times = schedule(seed)
        assert times.shape == (100,)
        assert times[0] > 0
        assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_has_the_asked_rate_and_variation(burstiness: float) -> None:
    times = gamma(50.0, 200_000, burstiness=burstiness, seed=1)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert np.isclose(gaps.mean(), 1 / 50.0, rtol=0.02)
    assert np.isclose(gaps.std() / gaps.mean(), burstiness**-0.5, rtol=0.02)


def test_on_off_has_the_asked_mean_rate_in_bursts_and_silences() -> None:
    times = on_off(10.0, 200_000, on_s=5.0, off_s=20.0, seed=1)
    assert np.isclose(len(times) / times[-1], 10.0, rtol=0.05)
    silences = np.diff(times)[np.diff(times) > 1.0]  # inside bursts: 50 per second
    assert np.isclose(silences.mean(), 1.0 + 20.0, rtol=0.1)  # what is left of an exponential after a second
    assert np.isclose(len(silences), times[-1] / 25.0 * np.exp(-1 / 20), rtol=0.1)
    in_bursts = np.diff(times)[np.diff(times) < 0.2]
    assert np.isclose(in_bursts.mean(), 1 / 50.0, rtol=0.05)


def test_on_off_has_bursts_with_a_rate_where_gamma_of_the_same_variation_has_clumps() -> None:
    switched = arrival_statistics(on_off(10.0, 100_000, on_s=5.0, off_s=20.0, seed=2))
    assert switched.gap_cv is not None
    renewed = arrival_statistics(gamma(10.0, 100_000, burstiness=switched.gap_cv**-2, seed=2))
    assert renewed.gap_cv == pytest.approx(switched.gap_cv, rel=0.1)
    assert switched.bursts[60].idc == pytest.approx(renewed.bursts[60].idc, rel=0.2)  # both tend to CV ** 2
    assert renewed.bursts[1].idc > 2 * switched.bursts[1].idc


def test_on_off_begins_with_a_burst() -> None:
    assert max(on_off(1.0, 1, on_s=1000.0, off_s=1000.0, seed=seed)[0] for seed in range(30)) < 10


def test_on_off_without_arrivals() -> None:
    assert len(on_off(1.0, 0, on_s=1, off_s=1)) == 0


@pytest.mark.parametrize(("start", "end"), [(2.0, 10.0), (10.0, 2.0), (0.0, 8.0), (8.0, 0.0), (5.0, 5.0)])
def test_linear_ramp_rises_evenly_in_time(start: float, end: float) -> None:
    count = 100_000
    times = linear_ramp(start, end, count, seed=1)
    duration_s = 2 * count / (start + end)
    for share in (0.1, 0.3, 0.5, 0.9):
        expected = duration_s * (start * share + (end - start) * share**2 / 2)
        assert np.searchsorted(times, duration_s * share) == pytest.approx(expected, rel=0.02, abs=300)


@pytest.mark.parametrize(("start", "end"), [(1.0, 16.0), (16.0, 1.0), (4.0, 4.0)])
def test_exponential_ramp_multiplies_evenly_in_time(start: float, end: float) -> None:
    count = 100_000
    times = exponential_ramp(start, end, count, seed=1)
    ratio = end / start
    duration_s = count / start if ratio == 1 else count * np.log(ratio) / (end - start)
    for share in (0.25, 0.5, 0.75):
        expected = count * (share if ratio == 1 else (ratio**share - 1) / (ratio - 1))
        assert np.searchsorted(times, duration_s * share) == pytest.approx(expected, rel=0.02, abs=300)


def test_steps_have_their_rates_and_the_last_goes_on() -> None:
    times = stepped([Step(100.0, 10.0), Step(1000.0, 10.0), Step(50.0, 1.0)], 16_050, burstiness=100.0, seed=1)
    per_ten_s = np.histogram(times, [0, 10, 20, 40, 60])[0]
    assert per_ten_s == pytest.approx([1000, 10_000, 1000, 1000], rel=0.03)


def test_smooth_ramps_are_smoother_than_poisson_ones() -> None:
    """Burstiness holds on the clock on which the rate is one."""
    for burstiness in (0.25, 4.0):
        due = np.interp(
            stepped([Step(1, 1000), Step(9, 1000)], 10_000, burstiness=burstiness, seed=2),
            [0, 1000, 2000],
            [0, 1000, 10_000],
        )
        assert np.diff(due).std() == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.0, 1), "rate is 0.0"), ((1.0, -1), "count is -1"), ((float("inf"), 1), "rate is inf")],
)
def test_values_out_of_range_are_named(arguments: tuple[float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        constant(*arguments)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda: at_once(-1), "count is -1"),
        (lambda: gamma(1.0, 1, burstiness=0), "burstiness is 0"),
        (lambda: gamma(1.0, 1, burstiness=float("inf")), "burstiness is inf"),
        (lambda: on_off(1.0, 1, on_s=0, off_s=1), "on_s is 0 seconds"),
        (lambda: on_off(1.0, 1, on_s=1, off_s=float("nan")), "off_s is nan seconds"),
        (lambda: linear_ramp(-1, 4, 1), "start rate is -1"),
        (lambda: linear_ramp(0, 0, 1), "mean of start and end rate is 0"),
        (lambda: exponential_ramp(0, 4, 1), "start rate is 0"),
        (lambda: exponential_ramp(4, float("inf"), 1), "end rate is inf"),
        (lambda: stepped([], 1), "there are no steps"),
        (lambda: stepped([Step(0, 1)], 1), "rate of a step is 0"),
        (lambda: stepped([Step(1, 0)], 1), "duration of a step is 0"),
    ],
)
def test_shapes_out_of_range_are_named(schedule: Callable[[], np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule()
