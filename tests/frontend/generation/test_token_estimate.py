"""Estimates follow the prompts of their model."""

import pytest

from frontend.generation.token_estimate import TokenEstimate


def test_four_characters_are_a_token_at_first():
    assert TokenEstimate().num_tokens("m", 400) == 100


def test_a_prompt_has_at_least_one_token():
    assert TokenEstimate().num_tokens("m", 0) == 1


def test_the_ratio_of_a_model_is_learned():
    estimate = TokenEstimate()
    for _ in range(200):
        estimate.learn_tokens("dense", 1000, 1000)
        estimate.learn_cached("dense", 100, 75)
    assert estimate.num_tokens("dense", 400) == 400
    assert estimate.computed_share("dense") == pytest.approx(0.25, abs=0.01)
    assert estimate.num_tokens("other", 400) == 100
    assert estimate.computed_share("other") == 1.0


def test_one_long_prompt_does_not_decide():
    estimate = TokenEstimate()
    estimate.learn_tokens("m", 10**6, 10**6)
    assert estimate.num_tokens("m", 400) == 115


def test_greetings_in_a_chat_template_do_not_decide():
    estimate = TokenEstimate()
    for _ in range(500):
        estimate.learn_tokens("m", 4, 31)
        estimate.learn_tokens("m", 4000, 1030)
    assert estimate.num_tokens("m", 4000) == pytest.approx(1030, rel=0.15)


def test_short_prompts_are_learned_from_too():
    estimate = TokenEstimate()
    for _ in range(2000):
        estimate.learn_tokens("m", 50, 50)
    assert estimate.num_tokens("m", 50) == pytest.approx(50, rel=0.1)


def test_models_are_bounded():
    estimate = TokenEstimate(max_models=2)
    for name in "abc":
        estimate.learn_tokens(name, 1000, 1000)
    assert estimate.num_tokens("c", 1000) > 250
    assert estimate.num_tokens("a", 1000) == 250
