"""Who sits where: one seat per request, one request per seat, and arithmetic counted step by step."""

import random
from collections import defaultdict

import pytest

from loadgen.errors import ResultError
from loadgen.experiments.batching.simulation import rows_of_steps
from loadgen.experiments.batching.slots import Seating, Sitting, padded_tokens, seat_requests
from loadgen.experiments.batching.step_log import Step, Usage
from tests.support.loadgen.batching import engine_steps


def step(*rows: int, finished: tuple[int, ...] = (), preempted: tuple[int, ...] = ()) -> Step:
    usage = Usage(4, 0, 2)
    return Step(0.0, 1.0, dict.fromkeys(rows, 1), dict.fromkeys(finished, usage), preempted, 0, 0)


def occupants(seating: Seating) -> dict[tuple[int, int], list[int]]:
    """(step, seat) -> requests, one entry per step of every sitting."""
    table = defaultdict(list)
    for sitting in seating.sittings:
        for index in range(sitting.begin, sitting.end):
            table[index, sitting.seat].append(sitting.request)
    return table


def random_usages(rng: random.Random) -> list[Usage]:
    return [Usage(rng.randint(1, 40), 0, rng.randint(1, 25)) for _ in range(rng.randint(1, 50))]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_nobody_shares_a_seat_or_changes_it(seed: int, static: bool) -> None:
    rng = random.Random(seed)
    usages, num_seats = random_usages(rng), rng.randint(1, 8)
    steps = engine_steps(usages, num_seats, static=static, step_ms=lambda rows: 1.0, first=rng.randint(1, 1000))
    seating = seat_requests(steps, num_seats)
    table = occupants(seating)
    assert all(len(requests) == 1 for requests in table.values())
    assert all(0 <= seat < num_seats for _, seat in table)
    seats = defaultdict(set)
    for (index, seat), (request,) in table.items():
        seats[request].add(seat)
        assert request in steps[index].rows
    assert all(len(taken) == 1 for taken in seats.values())
    assert len(table) == sum(len(one.rows) for one in steps) == seating.num_taken
    assert seating.lengths() == [usage.output for usage in usages]
    expected = rows_of_steps(seating.lengths(), num_seats, static=static)
    assert [len(one.rows) for one in steps] == expected
    assert seating.utilisation == pytest.approx(sum(expected) / (num_seats * len(expected)))


def test_the_lowest_seat_is_taken_and_a_seat_is_kept_without_a_row() -> None:
    steps = [step(5, 6), step(6), step(5, 6, finished=(6,)), step(5, 8, finished=(5, 8))]
    seating = seat_requests(steps, 2)
    assert [(s.request, s.seat, s.begin, s.end) for s in seating.sittings] == [(5, 0, 0, 4), (6, 1, 0, 3), (8, 1, 3, 4)]
    assert seating.utilisation == 1.0


def test_of_several_free_seats_the_lowest_is_taken() -> None:
    steps = [step(1, 2, 3, 4, finished=(4, 3, 2, 1)), step(5, 6, finished=(5, 6))]
    assert [s.seat for s in seat_requests(steps, 4).sittings] == [0, 1, 2, 3, 0, 1]


def test_whoever_is_preempted_gives_its_seat_up_and_sits_down_again() -> None:
    steps = [step(1, 2), step(1, 3, preempted=(2,), finished=(3,)), step(1, 2, finished=(1, 2))]
    seating = seat_requests(steps, 2)
    assert [(s.request, s.seat, s.begin, s.end, s.usage is None) for s in seating.sittings] == [
        (1, 0, 0, 3, False),
        (2, 1, 0, 1, True),
        (3, 1, 1, 2, False),
        (2, 1, 2, 3, False),
    ]
    assert seating.lengths() == [2, 2, 2]


def test_more_requests_than_seats_are_an_error() -> None:
    with pytest.raises(ResultError, match=r"step 1 has requests \[1, 2, 3\] on 2 seats"):
        seat_requests([step(1, 2), step(1, 2, 3)], 2)


def test_a_log_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(ResultError, match=r"requests \[2\] are running"):
        seat_requests([step(1, 2), step(1, 2, finished=(1,))], 2)


@pytest.mark.parametrize("seed", range(10))
def test_static_batches_are_found_again_and_padded_to_their_longest(seed: int) -> None:
    rng = random.Random(seed)
    usages, num_seats = random_usages(rng), rng.randint(1, 8)
    batches = seat_requests(engine_steps(usages, num_seats, static=True, step_ms=lambda rows: 1.0), num_seats).batches()
    planned = [usages[start : start + num_seats] for start in range(0, len(usages), num_seats)]
    assert [[sitting.usage for sitting in batch] for batch in batches] == planned
    for batch, rows in zip(batches, planned, strict=True):
        positions = max(usage.prompt for usage in rows)
        rectangle = [[True] * positions for _ in rows]  # then one column per further token that is computed
        while len(rectangle[0]) < positions + max(usage.output for usage in rows) - 1:
            rectangle = [[*row, True] for row in rectangle]
        assert padded_tokens(batch) == sum(map(sum, rectangle))


def test_a_batch_without_finished_requests_has_nothing_to_pad() -> None:
    assert padded_tokens([Sitting(1, 0, 0, 2, None)]) == 0
