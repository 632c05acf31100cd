"""Random operations on a device whose steps end late: every answer equals the one known beforehand."""

import secrets
from collections import Counter

import pytest

from engine.core.drafts import DraftLimits

OPERATIONS_PER_WORLD = 150
NUM_WORLDS = 40


@pytest.mark.slow
@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
def test_every_answer_is_that_of_the_request_alone_in_fresh_worlds(simulate, max_steps_in_flight):
    """Fresh seeds, without counts of events: 40 random worlds may lack a rare one."""
    run_worlds(simulate, secrets.randbelow(2**32), max_steps_in_flight)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("max_steps_in_flight", [2, 1, 3])
def test_every_answer_is_that_of_the_request_alone_and_every_event_occurs(simulate, max_steps_in_flight):
    """Worlds without events would prove nothing. The seeds are fixed, and with them every count."""
    seen = run_worlds(simulate, 0, max_steps_in_flight)
    wanted = {
        "tokens": 60,
        "steps": 40,
        "preemptions": 1,
        "prefix hits": 5,
        "mixed steps": 2,
        "padding rows": 5,
        "padding tokens": 5,
        "recorded steps with prompts": 5,
        "penalised answers": 2,
        "masked steps": 10,
        "prompt logprobs": 5,
        "prompts with draws": 1,
        "prompts in decode steps": 1,
        "CANCELLED": 0.2,
        "ENGINE_ERROR": 0.2,
        "END_TOKEN": 1,
        "STOP_TOKEN": 0.2,
        "MAX_TOKENS": 1,
    }
    rare = {name: seen[name] for name, per_world in wanted.items() if seen[name] < per_world * NUM_WORLDS}
    assert not rare, f"too rare in {NUM_WORLDS} worlds: {rare}"
    assert seen["large biases"] > 0
    assert seen["DEADLINE"] > 0
    assert (seen["unresolved ids"] > 10 * NUM_WORLDS) == (max_steps_in_flight > 1)


def test_so_it_is_with_drafts(simulate):
    """Half of the requests may have drafts; in a tiny cache there are few blocks for them."""
    limits = {"max_num_seqs": 12, "max_num_batched_tokens": 20, "num_blocks": 100}
    seen = run_worlds(simulate, 0, 1, drafts=DraftLimits(3, 2, 1), **limits)
    assert seen["drafted tokens"] > 4 * NUM_WORLDS
    assert seen["accepted tokens"] > NUM_WORLDS


def run_worlds(simulate, first_seed, max_steps_in_flight, **config):
    """Runs `NUM_WORLDS` worlds, which check their answers, and returns their events; an error names its world."""
    seen = Counter()
    for seed in range(first_seed, first_seed + NUM_WORLDS):
        try:
            seen += simulate(seed, OPERATIONS_PER_WORLD, max_steps_in_flight=max_steps_in_flight, **config).seen
        except BaseException as error:
            error.add_note(f"world {seed}, {max_steps_in_flight} steps in flight")
            raise
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_one_and_two_steps_in_flight_give_the_same_tokens(simulate, seed):
    """Requests that ended by a cancel or a deadline, whose time depends on the steps, are not compared."""
    worlds = [simulate(seed, OPERATIONS_PER_WORLD, max_steps_in_flight=count) for count in (1, 2)]
    common = worlds[0].tokens.keys() & worlds[1].tokens.keys()
    assert common
    assert all(worlds[0].tokens[request_id] == worlds[1].tokens[request_id] for request_id in common)
