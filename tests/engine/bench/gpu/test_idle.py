"""Idle time of a device, from its kernels and copies."""

import pytest

from engine.bench.gpu.idle import Interval, idle_shares


def test_largest_gaps_are_between_steps() -> None:
    steps = [Interval(start + i * 10, start + i * 10 + 9) for start in (0, 104, 208) for i in range(10)]
    idle = idle_shares(reversed(steps), num_steps=3)
    assert idle.span_us == 307
    assert idle.between_steps == pytest.approx(2 * 5 / 307)
    assert idle.total == pytest.approx((27 + 10) / 307)


def test_overlapping_intervals_have_no_gap() -> None:
    idle = idle_shares([Interval(0, 10), Interval(2, 4), Interval(5, 12), Interval(12, 20)], num_steps=4)
    assert idle == (20, 0, 0)


def test_one_step_has_no_gap_between_steps() -> None:
    assert idle_shares([Interval(0, 1), Interval(2, 3)], num_steps=1) == (3, 0, pytest.approx(1 / 3))


def test_no_intervals_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing ran"):
        idle_shares([], 1)
