"""When a step loop counts as stalled, in looks of a quarter of a second."""

import itertools
from collections.abc import Iterable

from engine.serving.stall import StallMeter

LOOK_S = 0.25


def looks_until_stalled(marks: Iterable[object], *, after: Iterable[object] = ()) -> int | None:
    """How many looks it takes after some others; None: it never counts as stalled."""
    meter = StallMeter(LOOK_S)
    assert not any(meter.observe(mark) for mark in after)
    return next((number for number, mark in enumerate(marks, 1) if meter.observe(mark)), None)


def pauses(num_looks: int, times: int) -> list[int]:
    """Marks that change after a number of looks."""
    return [mark for mark in range(times) for _ in range(num_looks + 1)]


def test_a_step_that_spins_is_noticed_within_three_seconds() -> None:
    num_looks = looks_until_stalled(itertools.repeat("spins"), after=range(100))
    assert num_looks is not None
    assert num_looks * LOOK_S <= 2.75  # the look that finds its last progress is one of them


def test_a_step_of_any_length_that_gets_on_is_none() -> None:
    """An hour of one step on a machine that lets it compute every half second only."""
    assert looks_until_stalled(mark // 2 for mark in range(4 * 3600)) is None


def test_the_limit_grows_with_the_pauses_of_the_machine() -> None:
    assert looks_until_stalled(itertools.repeat("spins"), after=pauses(8, 2)) == 1 + 4 * 8


def test_pauses_may_become_longer_step_by_step() -> None:
    growing = [mark for mark in range(1, 60) for _ in range(min(3 * mark, 2 ** min(mark, 8)) + 1)]
    assert looks_until_stalled(growing) is None


def test_a_stall_that_ends_is_none_any_more() -> None:
    meter = StallMeter(LOOK_S)
    assert [meter.observe("stands") for _ in range(12)][-1]
    assert not meter.observe("goes on")
