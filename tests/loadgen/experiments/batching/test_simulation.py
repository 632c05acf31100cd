"""The simulation of slots alone: cases worked by hand, and sums that it cannot know."""

import random

import pytest

from loadgen.experiments.batching.simulation import rows_of_steps


def test_a_slot_is_taken_again_in_the_next_step() -> None:
    assert rows_of_steps([2, 1, 3, 1], 2, static=False) == [2, 2, 2, 1]


def test_static_slots_stay_empty_until_the_longest_is_done() -> None:
    assert rows_of_steps([2, 1, 3, 1], 2, static=True) == [2, 1, 2, 1, 1]


def test_the_skewed_mix_takes_twenty_times_its_long_answer() -> None:
    lengths = ([16] * 63 + [1024]) * 20
    static = rows_of_steps(lengths, 64, static=True)
    assert len(static) == 20 * 1024
    assert sum(static) / (64 * len(static)) == pytest.approx((63 * 16 + 1024) / (64 * 1024))
    continuous = rows_of_steps(lengths, 64, static=False)
    assert 1024 + 15 * 16 < len(continuous) < 1024 + 25 * 16  # the last long answer begins once the short ones are gone


@pytest.mark.parametrize("seed", range(20))
def test_static_steps_are_the_sum_of_the_longest_of_each_batch(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.randint(1, 9)
    lengths = [rng.randint(1, 30) for _ in range(rng.randint(1, 60))]
    batches = [lengths[start : start + num_slots] for start in range(0, len(lengths), num_slots)]
    assert len(rows_of_steps(lengths, num_slots, static=True)) == sum(map(max, batches))


@pytest.mark.parametrize("seed", range(20))
def test_continuous_steps_are_those_of_slots_that_take_the_next_in_turn(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.randint(1, 9)
    lengths = [rng.randint(1, 30) for _ in range(rng.randint(1, 60))]
    free_at = [0] * num_slots
    for length in lengths:
        slot = free_at.index(min(free_at))
        free_at[slot] += length
    rows = rows_of_steps(lengths, num_slots, static=False)
    assert len(rows) == max(free_at)
    assert sum(rows) == sum(lengths)
    assert max(rows) <= num_slots


def test_without_requests_there_are_no_steps() -> None:
    assert rows_of_steps([], 4, static=False) == []


@pytest.mark.parametrize(("lengths", "num_slots"), [([1], 0), ([3, 0], 2)])
def test_slots_and_answers_must_not_be_nothing(lengths: list[int], num_slots: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        rows_of_steps(lengths, num_slots, static=True)
