"""Sampling parameters as columns, and what is forbidden while an answer is shorter than its min_tokens."""

import math

import numpy as np
import pytest

from engine.core.request import SamplingParams
from engine.runner.sampling_state import SamplingState

HISTORY = np.zeros((4, 8), dtype=np.int32)


@pytest.fixture
def state():
    return SamplingState(max_num_seqs=4, vocab_size=100, end_token_ids=(2, 7, 100))


def _gather(state, rows, num_output_tokens=(0,)):
    lengths = np.array([5 + n for n in num_output_tokens], dtype=np.int32)
    prompts = np.full(len(lengths), 5, dtype=np.int32)
    return state.gather(np.array(rows), token_ids=HISTORY, num_tokens=lengths, num_prompt_tokens=prompts)


def _biases(batch, i):
    entries = slice(batch.bias_start[i], batch.bias_start[i + 1])
    return list(zip(batch.bias_ids[entries].tolist(), batch.bias_values[entries].tolist(), strict=True))


def test_columns_hold_each_rows_own_values(state):
    first = SamplingParams(
        seed=2**64 - 1,
        max_tokens=1,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        top_logprobs=4,
    )
    state.set_row(3, first)
    state.set_row(1, SamplingParams(seed=5, max_tokens=1, top_k=2**31))
    batch = _gather(state, [1, 3], [0, 6])
    assert batch.temperature.tolist() == [1.0, 0.5]
    assert batch.top_p.tolist() == [1.0, 0.25]
    assert batch.top_k.tolist() == [100, 3]
    assert batch.min_p.tolist() == [0.0, 0.125]
    assert batch.repetition_penalty.tolist() == [1.0, 1.5]
    assert batch.presence_penalty.tolist() == [0.0, -1.0]
    assert batch.frequency_penalty.tolist() == [0.0, 2.0]
    assert batch.seed.tolist() == [5, -1]
    assert batch.position.tolist() == [0, 6]
    assert batch.top_logprobs.tolist() == [-1, 4]
    assert batch.max_top_logprobs == 4
    assert batch.history_row.tolist() == [1, 3]
    assert batch.bias_start.tolist() == [0, 0, 0]


def test_biases_are_those_of_the_row_and_go_with_its_request(state):
    state.set_row(0, SamplingParams(seed=0, max_tokens=1, logit_bias=((5, 1.5), (6, -2.0))))
    state.set_row(1, SamplingParams(seed=0, max_tokens=1))
    state.set_row(2, SamplingParams(seed=0, max_tokens=1, logit_bias=((9, 0.5),)))
    batch = _gather(state, [2, 1, 0], [0, 0, 0])
    assert [_biases(batch, i) for i in range(3)] == [[(9, 0.5)], [], [(5, 1.5), (6, -2.0)]]
    state.set_row(0, SamplingParams(seed=0, max_tokens=1))
    assert _biases(_gather(state, [0]), 0) == []


@pytest.mark.parametrize(
    ("ignore_eos", "forbidden"), [(False, [2, 7, 50]), (True, [50])], ids=["end tokens end", "end tokens are ignored"]
)
def test_what_ends_an_answer_is_forbidden_before_min_tokens(state, ignore_eos, forbidden):
    """Token 100, an end token of the model's files, is beyond the vocabulary and must not be written to."""
    params = SamplingParams(seed=0, max_tokens=9, min_tokens=3, stop_token_ids=(50,), ignore_eos=ignore_eos)
    state.set_row(0, params)
    for num_output_tokens in range(5):
        want = [(i, -math.inf) for i in forbidden] if num_output_tokens < 3 else []
        assert _biases(_gather(state, [0], [num_output_tokens]), 0) == want
