import pytest

from engine.core.latency.moving_rate import MovingRate


def test_a_rate_is_unknown_before_the_first_sample_and_exact_after_it() -> None:
    rate = MovingRate(1.0)
    assert rate.per_s is None
    rate.add(5, 0.0)
    assert rate.per_s is None
    rate.add(30, 0.1)
    assert rate.per_s == pytest.approx(300.0)


def test_samples_weigh_by_their_time() -> None:
    rate = MovingRate(100.0)
    rate.add(100, 1.0)
    for _ in range(10):
        rate.add(0, 0.1)
    assert rate.per_s == pytest.approx(50.0, rel=0.02)


def test_a_change_is_followed_within_a_few_time_constants() -> None:
    rate = MovingRate(1.0)
    for _ in range(100):
        rate.add(100, 0.1)
    for _ in range(40):
        rate.add(10, 0.1)
    assert rate.per_s == pytest.approx(100.0, rel=0.2)
