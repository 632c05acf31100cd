"""Which prompts are given up when not all can be in time."""

import random
from collections.abc import Iterable
from itertools import combinations

import pytest

from engine.core.latency.feasibility import Slots, WaitingPrompt, find_late

ANY = Slots(num_free=1000)


def given_up(prompts: list[WaitingPrompt], start_s: float = 0.0, slots: Slots = ANY) -> set[int]:
    return {late.position for late in find_late(prompts, 0.0, start_s, slots)}


def is_in_time(prompts: list[WaitingPrompt]) -> bool:
    end_s = 0.0
    for prompt in prompts:
        end_s += prompt.work_s
        if end_s > prompt.due_s and not prompt.must_stay:
            return False
    return True


def test_nothing_is_given_up_while_all_can_be_in_time() -> None:
    assert given_up([WaitingPrompt(1.0, 0.5), WaitingPrompt(1.0, 0.5)]) == set()


def test_the_longest_of_equal_value_is_given_up_even_if_another_one_would_be_late() -> None:
    assert given_up([WaitingPrompt(2.0, 1.8), WaitingPrompt(2.1, 0.2), WaitingPrompt(2.2, 0.3)]) == {0}


def test_value_is_weighed_against_work() -> None:
    prompts = [WaitingPrompt(2.0, 1.8, value=100.0), WaitingPrompt(2.1, 0.2), WaitingPrompt(2.2, 0.3)]
    assert given_up(prompts) == {2}  # dropping the first would lose 100; 1 / 0.3 s is the least per second


def test_the_answer_is_part_of_the_cost_but_not_of_the_time_until_the_first_token() -> None:
    prompts = [WaitingPrompt(1.0, 0.5, cost_s=0.5), WaitingPrompt(1.0, 0.4, cost_s=2.0), WaitingPrompt(1.0, 0.4)]
    assert given_up(prompts) == {1}
    assert given_up([WaitingPrompt(1.0, 0.5, cost_s=9.0), WaitingPrompt(1.0, 0.5, cost_s=9.0)]) == set()


@pytest.mark.parametrize("seed", range(100))
def test_of_equal_work_with_one_due_time_those_with_the_most_value_per_cost_stay(seed: int) -> None:
    """All fit or fail alike, so the best set is any of the right size with the highest sum."""
    rng = random.Random(seed)
    num_prompts = rng.randrange(1, 9)
    prompts = [WaitingPrompt(1.0, 0.3, rng.uniform(0.5, 2.0), cost_s=rng.uniform(0.1, 3.0)) for _ in range(num_prompts)]

    def worth(indexes: Iterable[int]) -> float:
        return sum(prompts[index].value / (prompts[index].cost_s or 0.3) for index in indexes)

    kept = set(range(num_prompts)) - given_up(prompts)
    assert len(kept) == min(3, num_prompts)
    assert worth(kept) == pytest.approx(max(map(worth, combinations(range(num_prompts), len(kept)))))


def test_tenants_over_their_share_lose_first() -> None:
    prompts = [WaitingPrompt(2.0, 1.8), WaitingPrompt(2.1, 0.2, is_over_share=True), WaitingPrompt(2.2, 0.3)]
    assert given_up(prompts) == {1}


def test_a_prompt_that_must_stay_is_never_given_up_and_its_work_counts() -> None:
    assert given_up([WaitingPrompt(0.1, 1.0, must_stay=True), WaitingPrompt(0.9, 0.2), WaitingPrompt(1.5, 0.3)]) == {1}


def test_no_prompt_is_given_up_in_vain() -> None:
    late = WaitingPrompt(0.6, 1.0)
    for prompt, expected in ((late, {1}), (late._replace(value=100.0), {1}), (late._replace(must_stay=True), set())):
        assert given_up([WaitingPrompt(0.5, 0.1), prompt, WaitingPrompt(2.0, 0.2)]) == expected


def test_several_are_given_up_for_one_that_is_worth_more_or_of_a_tenant_within_its_share() -> None:
    small = [WaitingPrompt(1.0, 0.1)] * 5
    assert len(given_up([*small, WaitingPrompt(1.0, 0.8, value=10.0)])) == 3
    assert given_up([*small, WaitingPrompt(1.0, 0.8, value=2.0)]) == {5}
    small = [prompt._replace(is_over_share=True) for prompt in small]
    assert len(given_up([*small, WaitingPrompt(1.0, 0.8)])) == 3


def test_work_that_runs_already_delays_the_first() -> None:
    prompts = [WaitingPrompt(1.0, 0.5)]
    assert given_up(prompts, start_s=0.4) == set()
    assert given_up(prompts, start_s=0.6) == {0}


def test_prompts_beyond_the_free_slots_wait_until_answers_end() -> None:
    prompts = [WaitingPrompt(1.0, 0.1), WaitingPrompt(1.0, 0.1), WaitingPrompt(1.0, 0.1)]
    assert given_up(prompts, slots=Slots(1)) == set()  # the rate is unknown
    assert given_up(prompts, slots=Slots(1, released_per_s=10.0)) == set()
    assert len(given_up(prompts, slots=Slots(1, released_per_s=1.0))) == 2
    assert len(given_up(prompts, slots=Slots(0, released_per_s=0.5))) == 3


def test_a_prompt_that_is_given_up_leaves_its_slot_to_the_next() -> None:
    prompts = [WaitingPrompt(0.5, 3.0), WaitingPrompt(1.0, 0.1)]
    assert given_up(prompts, slots=Slots(1, released_per_s=0.5)) == {0}


def test_the_expected_time_of_the_first_token_is_reported() -> None:
    (late,) = find_late([WaitingPrompt(1.0, 3.0)], 0.0, 0.5, ANY)
    assert late.expected_s == 3.5


@pytest.mark.parametrize("stay_share", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(200))
def test_the_fewest_prompts_are_given_up_and_the_rest_is_in_time(seed: int, stay_share: float) -> None:
    """Against all subsets. Those that must stay are computed in their turn and may be late."""
    rng = random.Random(seed)
    prompts = [
        WaitingPrompt(rng.uniform(0.1, 5.0), rng.uniform(0.05, 2.0), must_stay=rng.random() < stay_share)
        for _ in range(rng.randrange(1, 9))
    ]
    prompts.sort(key=lambda prompt: prompt.due_s)
    free = [index for index, prompt in enumerate(prompts) if not prompt.must_stay]

    def is_enough(late: Iterable[int]) -> bool:
        return is_in_time([prompt for index, prompt in enumerate(prompts) if index not in set(late)])

    late = given_up(prompts)
    assert late <= set(free)
    assert is_enough(late)
    assert len(late) == next(size for size in range(9) if any(map(is_enough, combinations(free, size))))
