import numpy as np
import pytest

from loadgen.arrivals import constant, gamma


def test_constant_arrivals_are_evenly_spaced_from_zero() -> None:
    assert constant(4.0, 5).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_same_seed_same_schedule() -> None:
    assert np.array_equal(gamma(10, 100, seed=3), gamma(10, 100, seed=3))
    assert not np.array_equal(gamma(10, 100, seed=3), gamma(10, 100, seed=4))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_has_the_asked_rate_and_variation(burstiness: float) -> None:
    times = gamma(50.0, 200_000, burstiness=burstiness, seed=1)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert np.isclose(gaps.mean(), 1 / 50.0, rtol=0.02)
    assert np.isclose(gaps.std() / gaps.mean(), burstiness**-0.5, rtol=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.0, 1), "rate is 0.0"), ((1.0, -1), "count is -1"), ((float("inf"), 1), "rate is inf")],
)
def test_values_out_of_range_are_named(arguments: tuple[float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        constant(*arguments)


def test_burstiness_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match="burstiness is 0"):
        gamma(1.0, 1, burstiness=0)
