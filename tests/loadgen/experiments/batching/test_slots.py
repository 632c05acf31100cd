"""Who runs where: one slot per request, one request per slot, and arithmetic counted step by step."""

import random
from collections import defaultdict

import pytest

from loadgen.errors import ResultError
from loadgen.experiments.batching.simulation import rows_of_steps
from loadgen.experiments.batching.slots import Occupancy, SlotUse, assign_slots, padded_tokens
from loadgen.step_log import Step, Usage
from tests.support.loadgen.batching import engine_steps


def step(*rows: int, finished: tuple[int, ...] = (), preempted: tuple[int, ...] = ()) -> Step:
    usage = Usage(4, 0, 2)
    return Step(0.0, 1.0, dict.fromkeys(rows, 1), dict.fromkeys(finished, usage), preempted, 0, 0)


def occupants(slot_use: SlotUse) -> dict[tuple[int, int], list[int]]:
    """(step, slot) -> requests, one entry per step of every sitting."""
    table = defaultdict(list)
    for occupancy in slot_use.occupancies:
        for index in range(occupancy.begin, occupancy.end):
            table[index, occupancy.slot].append(occupancy.request)
    return table


def random_usages(rng: random.Random) -> list[Usage]:
    return [Usage(rng.randint(1, 40), 0, rng.randint(1, 25)) for _ in range(rng.randint(1, 50))]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_nobody_shares_a_slot_or_changes_it(seed: int, static: bool) -> None:
    rng = random.Random(seed)
    usages, num_slots = random_usages(rng), rng.randint(1, 8)
    steps = engine_steps(usages, num_slots, static=static, step_ms=lambda rows: 1.0, first=rng.randint(1, 1000))
    slot_use = assign_slots(steps, num_slots)
    table = occupants(slot_use)
    assert all(len(requests) == 1 for requests in table.values())
    assert all(0 <= slot < num_slots for _, slot in table)
    slots = defaultdict(set)
    for (index, slot), (request,) in table.items():
        slots[request].add(slot)
        assert request in steps[index].rows
    assert all(len(taken) == 1 for taken in slots.values())
    assert len(table) == sum(len(one.rows) for one in steps) == slot_use.num_taken
    assert slot_use.lengths() == [usage.output for usage in usages]
    expected = rows_of_steps(slot_use.lengths(), num_slots, static=static)
    assert [len(one.rows) for one in steps] == expected
    assert slot_use.utilisation == pytest.approx(sum(expected) / (num_slots * len(expected)))


def test_the_lowest_slot_is_taken_and_a_slot_is_kept_without_a_row() -> None:
    steps = [step(5, 6), step(6), step(5, 6, finished=(6,)), step(5, 8, finished=(5, 8))]
    slot_use = assign_slots(steps, 2)
    assert [(s.request, s.slot, s.begin, s.end) for s in slot_use.occupancies] == [
        (5, 0, 0, 4),
        (6, 1, 0, 3),
        (8, 1, 3, 4),
    ]
    assert slot_use.utilisation == 1.0


def test_of_several_free_slots_the_lowest_is_taken() -> None:
    steps = [step(1, 2, 3, 4, finished=(4, 3, 2, 1)), step(5, 6, finished=(5, 6))]
    assert [s.slot for s in assign_slots(steps, 4).occupancies] == [0, 1, 2, 3, 0, 1]


def test_whoever_is_preempted_gives_its_slot_up_and_sits_down_again() -> None:
    steps = [step(1, 2), step(1, 3, preempted=(2,), finished=(3,)), step(1, 2, finished=(1, 2))]
    slot_use = assign_slots(steps, 2)
    assert [(s.request, s.slot, s.begin, s.end, s.usage is None) for s in slot_use.occupancies] == [
        (1, 0, 0, 3, False),
        (2, 1, 0, 1, True),
        (3, 1, 1, 2, False),
        (2, 1, 2, 3, False),
    ]
    assert slot_use.lengths() == [2, 2, 2]


def test_more_requests_than_slots_are_an_error() -> None:
    with pytest.raises(ResultError, match=r"step 1 has requests \[1, 2, 3\] on 2 slots"):
        assign_slots([step(1, 2), step(1, 2, 3)], 2)


def test_a_log_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(ResultError, match=r"requests \[2\] are running"):
        assign_slots([step(1, 2), step(1, 2, finished=(1,))], 2)


@pytest.mark.parametrize("seed", range(10))
def test_static_batches_are_found_again_and_padded_to_their_longest(seed: int) -> None:
    rng = random.Random(seed)
    usages, num_slots = random_usages(rng), rng.randint(1, 8)
    batches = assign_slots(engine_steps(usages, num_slots, static=True, step_ms=lambda rows: 1.0), num_slots).batches()
    planned = [usages[start : start + num_slots] for start in range(0, len(usages), num_slots)]
    assert [[occupancy.usage for occupancy in batch] for batch in batches] == planned
    for batch, rows in zip(batches, planned, strict=True):
        positions = max(usage.prompt for usage in rows)
        rectangle = [[True] * positions for _ in rows]  # then one column per further token that is computed
        while len(rectangle[0]) < positions + max(usage.output for usage in rows) - 1:
            rectangle = [[*row, True] for row in rectangle]
        assert padded_tokens(batch) == sum(map(sum, rectangle))


def test_a_batch_without_finished_requests_has_nothing_to_pad() -> None:
    assert padded_tokens([Occupancy(1, 0, 0, 2, None)]) == 0
