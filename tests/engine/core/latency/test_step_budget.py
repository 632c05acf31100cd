"""The governor: prompt tokens that fit into the time of a step."""

import random

import pytest

from engine.core.latency.step_budget import FLOOR_SHARE, FLOOR_TOKENS, StepBudget
from engine.core.latency.step_time import Coefficients, StepShape, StepTimeModel, StepTimePrior

MODEL = StepTimeModel(StepTimePrior(Coefficients(0.6e-3, 20.5e-6, 0.5e-6, 36e-9, 1.37e-9), knee_tokens=205))
NO_PAIRS = StepTimeModel(StepTimePrior(Coefficients(1e-3, 1e-4, 0.0, 0.0, 0.0)))


def test_without_attention_and_knee_the_chunk_is_the_room_over_the_price_of_a_token() -> None:
    assert StepBudget(NO_PAIRS, 0, 0, allowed_s=0.0211).max_chunk(0) == 201


@pytest.mark.parametrize("seed", range(100))
def test_the_largest_chunk_fits_and_one_token_more_does_not(seed: int) -> None:
    rng = random.Random(seed)
    num_rows, num_computed = rng.randrange(300), rng.choice((0, 500, 8000, 60_000))
    num_kv_tokens = num_rows * rng.randrange(2000)
    allowed_s = rng.uniform(0.005, 0.2)
    budget = StepBudget(MODEL, num_rows, num_kv_tokens, allowed_s)
    chunk = budget.max_chunk(num_computed)

    def step_s(num_tokens: int) -> float:
        num_pairs = num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2
        return MODEL.predict_s(StepShape(num_rows + num_tokens, num_rows + 1, num_kv_tokens, num_pairs))

    if chunk > FLOOR_TOKENS:
        assert step_s(chunk) <= allowed_s * 1.001
        assert step_s(chunk + 2) > allowed_s * 0.999
    else:
        assert step_s(FLOOR_TOKENS + 2) > allowed_s * 0.999


def test_several_chunks_together_keep_the_time_of_the_step() -> None:
    budget = StepBudget(MODEL, 40, 40_000, allowed_s=0.02)
    num_tokens = num_rows = num_pairs = 0
    for num_computed in (0, 1000, 4000, 0, 2000):
        chunk = min(150, budget.max_chunk(num_computed))
        budget.spend(chunk, num_computed)
        num_tokens, num_rows = num_tokens + chunk, num_rows + 1
        num_pairs += chunk * num_computed + chunk * (chunk + 1) // 2
    assert num_tokens > 500
    assert MODEL.predict_s(StepShape(40 + num_tokens, 40 + num_rows, 40_000, num_pairs)) == pytest.approx(
        0.02 - budget.room_s
    )


def test_a_long_prompt_gets_smaller_chunks_late_than_early() -> None:
    budget = StepBudget(MODEL, 16, 16_000, allowed_s=0.02)
    assert budget.max_chunk(60_000) < 0.5 * budget.max_chunk(0)


def test_tokens_below_the_knee_are_free() -> None:
    just_reads_weights_s = MODEL.predict_s(StepShape(10, 10, 0, 0))
    assert StepBudget(MODEL, 10, 0, just_reads_weights_s + 1e-4).max_chunk(0) >= 195


@pytest.mark.parametrize("allowed_s", [-1.0, 0.0, 0.001])
def test_a_floor_of_tokens_is_given_when_decodes_alone_take_too_long(allowed_s: float) -> None:
    budget = StepBudget(MODEL, 100, 100_000, allowed_s)
    assert budget.max_chunk(5000) == FLOOR_TOKENS
    budget.spend(40, 5000)
    assert not budget.is_spent
    assert budget.max_chunk(0) == FLOOR_TOKENS - 40
    budget.spend(FLOOR_TOKENS - 40, 0)
    assert budget.is_spent
    assert budget.max_chunk(0) == 0


def test_the_share_of_prompts_is_what_decodes_leave_and_at_least_the_floor() -> None:
    assert StepBudget(NO_PAIRS, 0, 0, allowed_s=0.01).free_share == pytest.approx(0.9)
    floor_share = FLOOR_TOKENS * 1e-4 / (FLOOR_TOKENS * 1e-4 + 1e-3)
    for allowed_s in (-1.0, 0.0, 1e-4):
        assert StepBudget(NO_PAIRS, 0, 0, allowed_s).free_share == pytest.approx(floor_share)


SLOW = StepTimeModel(StepTimePrior(Coefficients(4e-3, 140e-6, 440e-6, 160e-9, 120e-9)))  # a small model on a CPU


@pytest.mark.parametrize("num_computed", [0, 500, 2000, 60_000])
def test_the_floor_takes_at_most_its_share_of_the_step(num_computed: int) -> None:
    decode_s = SLOW.predict_s(StepShape(16, 16, 8000, 0))
    for allowed_s in (0.5 * decode_s, decode_s, 2 * decode_s):
        budget = StepBudget(SLOW, 16, 8000, allowed_s)
        chunk = budget.max_chunk(num_computed)
        assert chunk < FLOOR_TOKENS or allowed_s > decode_s
        num_pairs = chunk * num_computed + chunk * (chunk + 1) // 2
        step_s = SLOW.predict_s(StepShape(16 + chunk, 17, 8000, num_pairs))
        assert step_s <= (1 + FLOOR_SHARE) * max(allowed_s, decode_s) * 1.001
        budget.spend(max(1, chunk), num_computed)
        assert budget.is_spent or budget.room_s > 0
