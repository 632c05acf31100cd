"""Rows of request state: kept from admission to removal, reused after."""

import random

import numpy as np
import pytest

from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import SamplingParams
from engine.runner.request_state import RequestState
from engine.runner.sampling_state import SamplingState

PARAMS = SamplingParams(seed=0, max_tokens=4)


@pytest.fixture
def state():
    sampling = SamplingState(max_num_seqs=3, vocab_size=100, end_token_ids=(2,))
    return RequestState(max_num_seqs=3, max_model_len=32, block_size=4, sampling=sampling)


def _plan(removed=(), new=(), rows=()):
    return SchedulerOutput(1, tuple(removed), tuple(new), tuple(rows), sum(row.num_scheduled_tokens for row in rows))


def _new(request_id, tokens, blocks, num_prompt_tokens=1):
    return NewRequest(request_id, tuple(tokens), num_prompt_tokens, PARAMS, tuple(blocks))


def _known(state, request_id):
    row = state.rows_of([request_id])[0]
    tokens = state.token_ids[row, : state.num_tokens[row]].tolist()
    return tokens, state.block_table[0, row, : state.num_blocks[row]].tolist()


def _append(state, request_ids, tokens):
    state.write_tokens(state.reserve_tokens(state.rows_of(request_ids)), np.array(tokens))


def test_a_new_request_brings_tokens_and_blocks(state):
    state.apply(_plan(new=[_new(7, [5, 6, 7], [9]), _new(8, [1], [4])]))
    assert _known(state, 7) == ([5, 6, 7], [9])
    assert _known(state, 8) == ([1], [4])
    assert state.num_prompt_tokens[state.rows_of([7])].tolist() == [1]


def test_new_requests_of_a_plan_keep_their_own_adapter_and_parameters(state):
    greedy = SamplingParams(seed=1, max_tokens=4, temperature=0.0)
    penalised = SamplingParams(seed=2**64 - 1, max_tokens=4, presence_penalty=0.5, top_logprobs=3)
    state.apply(
        _plan(
            new=[
                NewRequest(7, (5,), 1, greedy, (9,), adapter=2),
                NewRequest(8, (6, 7), 2, penalised, (4, 3)),
            ]
        )
    )
    rows = state.rows_of([7, 8])
    assert state.adapters[rows].tolist() == [2, -1]
    assert state.num_prompt_tokens[rows].tolist() == [1, 2]
    assert [state.sampling.is_penalised(row) for row in rows] == [False, True]


def test_rows_bring_blocks_and_samples_bring_tokens(state):
    state.apply(_plan(new=[_new(7, [5, 6, 7, 8], [9]), _new(8, [1], [4])]))
    _append(state, [8, 7], [11, 22])
    state.apply(_plan(rows=[ScheduledRow(7, 1, 4, (3, 1), True), ScheduledRow(8, 1, 1, (), True)]))
    assert _known(state, 7) == ([5, 6, 7, 8, 22], [9, 3, 1])
    assert _known(state, 8) == ([1, 11], [4])


def test_a_request_may_leave_and_come_back_in_one_plan(state):
    state.apply(_plan(new=[_new(7, [5, 6, 7, 8, 9], [9, 8])]))
    state.apply(_plan(removed=[7], new=[_new(7, [5, 6], [2])]))
    assert _known(state, 7) == ([5, 6], [2])


def test_a_token_in_flight_counts_and_names_its_row_until_it_lands(state):
    state.apply(_plan(new=[_new(7, [5, 6], [9]), _new(8, [1], [4])]))
    (row,) = state.rows_of([8])
    first = state.reserve_tokens(state.rows_of([8]))
    second = state.reserve_tokens(state.rows_of([8]))
    assert _known(state, 8) == ([1, -1 - row, -1 - row], [4])
    state.write_tokens(first, np.array([11]))
    assert _known(state, 8) == ([1, 11, -1 - row], [4])
    state.write_tokens(second, np.array([22]))
    assert _known(state, 8) == ([1, 11, 22], [4])


def test_a_token_that_lands_late_is_not_given_to_the_next_owner_of_its_row(state):
    state.apply(_plan(new=[_new(7, [5, 6], [9])]))
    landing = state.reserve_tokens(state.rows_of([7]))
    state.apply(_plan(removed=[7], new=[_new(8, [1, 2, 3, 4], [4])]))
    assert state.rows_of([8]) == landing.rows
    state.write_tokens(landing, np.array([99]))
    assert _known(state, 8) == ([1, 2, 3, 4], [4])


def test_a_failed_row_gets_no_token(state):
    state.apply(_plan(new=[_new(7, [5, 6], [9]), _new(8, [1], [4])]))
    _append(state, [7, 8], [-1, 11])
    (row,) = state.rows_of([7])
    assert _known(state, 7) == ([5, 6, -1 - row], [9])
    assert _known(state, 8) == ([1, 11], [4])


def test_random_histories_match_a_plain_model(state):
    rng = random.Random(0)
    model = {}
    for step in range(2000):
        removed = [request_id for request_id in model if rng.random() < 0.2]
        for request_id in removed:
            del model[request_id]
        new = []
        while len(model) < 3 and rng.random() < 0.6:
            request = _new(
                step * 10 + len(new), [rng.randrange(100) for _ in range(rng.randint(1, 6))], [rng.randrange(99)]
            )
            new.append(request)
            model[request.request_id] = (list(request.token_ids), list(request.block_ids))
        rows = []
        for request_id in rng.sample(sorted(model), rng.randint(0, len(model))):
            blocks = tuple(rng.randrange(99) for _ in range(rng.randint(0, 1)))
            if len(model[request_id][1]) + len(blocks) <= 8:
                model[request_id][1].extend(blocks)
                rows.append(ScheduledRow(request_id, 1, 0, blocks, True))
        state.apply(_plan(removed, new, rows))
        sampled = [row.request_id for row in rows if len(model[row.request_id][0]) < 32]
        tokens = [rng.randrange(100) for _ in sampled]
        if sampled:
            _append(state, sampled, tokens)
        for request_id, token_id in zip(sampled, tokens, strict=True):
            model[request_id][0].append(token_id)
        assert {request_id: _known(state, request_id) for request_id in model} == model
        state.check_integrity()
