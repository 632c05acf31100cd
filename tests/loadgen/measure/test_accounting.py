"""Tokens against the plan, cached tokens against the ideal."""

import math

import numpy as np
import pytest

from loadgen.measure.accounting import account_cache, account_tokens, count_outcomes
from loadgen.measure.samples import samples_of
from loadgen.record import Status
from loadgen.trace.schema import Blocks
from tests.support.loadgen.runs import Answered, run_of, synthetic_run


def test_too_long_and_too_short_do_not_cancel_out() -> None:
    run = run_of(
        [
            Answered(0.0, ((0.1, 12),), output_tokens=10, server_input_tokens=18),
            Answered(0.1, ((0.2, 8),), output_tokens=10, server_input_tokens=14),
            Answered(0.2, ((0.3, 10),), output_tokens=10),
        ]
    )
    tokens = account_tokens(run, samples_of(run))
    assert (tokens.requested_output, tokens.achieved_output, tokens.achieved_share) == (30, 30, 1.0)
    assert tokens.output_off == pytest.approx(4 / 30)
    assert (tokens.planned_input, tokens.server_input, tokens.input_off) == (32, 32, 4 / 32)


def test_only_answered_requests_are_held_to_the_plan() -> None:
    run = run_of(
        [Answered(0.0, ((0.1, 10),)), Answered(0.1, ((0.2, 1),), output_tokens=99, status=Status.TIMEOUT, ended_s=5.0)]
    )
    assert account_tokens(run, samples_of(run)).output_off == 0.0


def test_nothing_to_compare_is_nan_not_zero() -> None:
    run = synthetic_run(3, outcomes={Status.ERROR: 3})
    tokens = account_tokens(run, samples_of(run))
    assert math.isnan(tokens.output_off)
    assert math.isnan(tokens.input_off)
    assert math.isnan(tokens.achieved_share)
    assert account_cache(run, samples_of(run)) is None


def test_cache_hits_stand_beside_the_ideal_of_the_same_requests() -> None:
    """Three equal prompts of 100 tokens: the second and third could come whole from a cache; the third failed."""
    run = run_of(
        [
            Answered(0.0, ((0.1, 1),), input_tokens=100, cached_tokens=0),
            Answered(0.5, ((0.6, 1),), input_tokens=100, cached_tokens=64),
            Answered(1.0, status=Status.ERROR, ended_s=1.1, input_tokens=100, cached_tokens=64),
        ],
        blocks=Blocks(np.array([1, 2, 1, 2, 1, 2]), np.array([0, 2, 4, 6]), 50),
    )
    cache = account_cache(run, samples_of(run))
    assert cache is not None
    assert (cache.prompt_tokens, cache.cached_tokens, cache.ideal_tokens) == (200, 64, 100)
    assert (cache.share, cache.ideal_share, cache.above_ideal) == (0.32, 0.5, 0.0)


def test_prompts_without_a_report_found_nothing_where_others_report_hits() -> None:
    """vLLM leaves `prompt_tokens_details` out where nothing was cached. Three of four equal prompts found 64 tokens."""
    told = {"input_tokens": 100, "server_input_tokens": 100}
    answered = [Answered(0.0, ((0.1, 1),), **told)]
    answered += [Answered(due_s, ((due_s + 0.1, 1),), cached_tokens=64, **told) for due_s in (0.5, 1.0, 1.5)]
    answered.append(Answered(2.0, ((2.1, 1),), input_tokens=100))  # of this one nothing is known
    run = run_of(answered)
    cache = account_cache(run, samples_of(run))
    assert cache is not None
    assert (cache.prompt_tokens, cache.cached_tokens) == (400, 192)
    assert cache.share == 0.48


def test_what_a_server_adds_to_every_prompt_of_text_is_shared_by_all() -> None:
    """A chat template of 40 tokens, of which a cache of 16-token blocks holds 32; the third prompt is only template."""
    run = run_of(
        [
            Answered(0.0, ((0.1, 1),), input_tokens=100, cached_tokens=32),
            Answered(0.5, ((0.6, 1),), input_tokens=100, cached_tokens=32),
            Answered(1.0, ((1.1, 1),), input_tokens=24, cached_tokens=16),
        ],
        settings={"text_prompts": {"words": 128, "overhead_tokens": 40, "tokens_per_word": 1.0, "mismatch": 0.0}},
    )
    cache = account_cache(run, samples_of(run))
    assert cache is not None
    assert (cache.cached_tokens, cache.ideal_tokens, cache.above_ideal) == (80, 104, 0.0)


def test_outcomes_add_up() -> None:
    run = synthetic_run(60, outcomes={status: 2 + status for status in Status if status != Status.OK})
    counts = count_outcomes(run, np.ones(60, dtype=bool))
    assert (counts.error, counts.timeout, counts.cancelled, counts.dropped, counts.refused) == (5, 6, 7, 8, 9)
    assert (counts.in_flight, counts.unsent, counts.ok) == (3, 2, 60 - 40)
    assert count_outcomes(run, np.zeros(60, dtype=bool)).offered == 0
