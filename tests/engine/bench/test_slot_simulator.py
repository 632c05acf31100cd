"""The simulation of the bare seats, on cases counted by hand."""

import random

import pytest

from engine.bench.slot_simulator import continuous_steps, static_steps


@pytest.mark.parametrize(
    ("lengths", "num_seats", "continuous", "static"),
    [
        ([], 4, 0, 0),
        ([1], 4, 1, 1),
        ([3, 3], 1, 6, 6),  # one seat: nothing to gain
        ([2, 2, 2, 2], 2, 4, 4),  # equal lengths: nothing to gain
        # one seat has the 5, the other meanwhile 1, 2, 1 and 1
        ([1, 5, 2, 1, 1], 2, 5, 5 + 2 + 1),
        # the longest comes last and runs alone: both wait for it
        ([1, 1, 9], 2, 1 + 9, 1 + 9),
        # one seat has the 4; the other 1, 2 and 3 one after the other
        ([4, 1, 2, 3], 2, 6, 4 + 3),
    ],
)
def test_steps_counted_by_hand(lengths: list[int], num_seats: int, continuous: int, static: int) -> None:
    assert continuous_steps(lengths, num_seats) == continuous
    assert static_steps(lengths, num_seats) == static


def test_static_takes_the_longest_of_each_batch() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(1, 40) for _ in range(101)]
    assert static_steps(lengths, 8) == sum(max(lengths[start : start + 8]) for start in range(0, 101, 8))


def test_continuous_is_never_slower_and_never_faster_than_full_seats() -> None:
    rng = random.Random(2)
    for _ in range(50):
        lengths, num_seats = [rng.randint(1, 30) for _ in range(rng.randint(1, 60))], rng.randint(1, 9)
        steps = continuous_steps(lengths, num_seats)
        assert max(max(lengths), -(-sum(lengths) // num_seats)) <= steps <= static_steps(lengths, num_seats)
