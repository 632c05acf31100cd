"""Sampling parameters as columns, and tokens forbidden in answers shorter than min_tokens."""

import math

import numpy as np
import pytest
import torch

from engine.core.request import SamplingParams
from engine.runner.sampling_state import SamplingState, sampling_batch
from engine.runner.step_buffers import BIAS_CAPACITY, StepLayout

HISTORY = torch.zeros((4, 8), dtype=torch.int32)
LAYOUT = StepLayout(max_num_seqs=4, max_num_tokens=4, max_blocks=1)


@pytest.fixture
def state():
    return SamplingState(max_num_seqs=4, vocab_size=100, end_token_ids=(2, 7, 100))


def _gather(state, rows, num_output_tokens=(0,)):
    memory = torch.full((LAYOUT.num_bytes,), 255, dtype=torch.uint8)
    columns, biases = _write(state, rows, num_output_tokens, LAYOUT.arrays(memory))
    sections, count = LAYOUT.tensors(memory), len(biases.ids)
    return sampling_batch(columns, sections, HISTORY, sections.bias_ids[:count], sections.bias_values[:count])


def _write(state, rows, num_output_tokens, out):
    lengths = np.array([5 + n for n in num_output_tokens], dtype=np.int32)
    prompts = np.full(len(lengths), 5, dtype=np.int32)
    columns = state.fill(np.array(rows), prompts, out)
    return columns, state.advance(columns, lengths, out)


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
    state.set_rows([3], [first])
    state.set_rows([1], [SamplingParams(seed=5, max_tokens=1, top_k=2**31)])
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


@pytest.mark.parametrize(("seed", "bits"), [(2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)])
def test_seeds_keep_all_their_bits(state, seed, bits):
    state.set_rows([0], [SamplingParams(seed=seed, max_tokens=1)])
    assert _gather(state, [0]).seed.tolist() == [bits]


def test_biases_are_those_of_the_row_and_go_with_its_request(state):
    state.set_rows([0], [SamplingParams(seed=0, max_tokens=1, logit_bias=((5, 1.5), (6, -2.0)))])
    state.set_rows([1], [SamplingParams(seed=0, max_tokens=1)])
    state.set_rows([2], [SamplingParams(seed=0, max_tokens=1, logit_bias=((9, 0.5),))])
    batch = _gather(state, [2, 1, 0], [0, 0, 0])
    assert [_biases(batch, i) for i in range(3)] == [[(9, 0.5)], [], [(5, 1.5), (6, -2.0)]]
    state.set_rows([0], [SamplingParams(seed=0, max_tokens=1)])
    assert _biases(_gather(state, [0]), 0) == []


@pytest.mark.parametrize(
    ("ignore_end_token", "forbidden"),
    [(False, [2, 7, 50]), (True, [50])],
    ids=["end tokens end", "end tokens are ignored"],
)
def test_what_ends_an_answer_is_forbidden_before_min_tokens(state, ignore_end_token, forbidden):
    """Token 100, an end token of the model's files, is beyond the vocabulary and must not be written to."""
    params = SamplingParams(seed=0, max_tokens=9, min_tokens=3, stop_token_ids=(50,), ignore_end_token=ignore_end_token)
    state.set_rows([0], [params])
    for num_output_tokens in range(5):
        want = [(i, -math.inf) for i in forbidden] if num_output_tokens < 3 else []
        assert _biases(_gather(state, [0], [num_output_tokens]), 0) == want


def test_biases_that_exceed_the_buffer_are_sent_separately(state):
    ids = tuple((i % 100, float(i)) for i in range(BIAS_CAPACITY))
    state.set_rows([0], [SamplingParams(seed=0, max_tokens=1, logit_bias=ids)])
    state.set_rows([1], [SamplingParams(seed=0, max_tokens=1, logit_bias=((3, 4.0),))])
    out = LAYOUT.arrays(torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8))
    _, biases = _write(state, [0, 1], [0, 0], out)
    assert len(biases.ids) == BIAS_CAPACITY + 1
    assert (biases.ids[-1], biases.values[-1]) == (3, 4.0)
    assert out.bias_start[:3].tolist() == [0, BIAS_CAPACITY, BIAS_CAPACITY + 1]
    assert not out.bias_values.any()


@pytest.mark.parametrize(
    ("changes", "hints"),
    [
        ({}, (False, True, False)),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, (False, False, False)),
        ({"top_k": 3}, (False, True, True)),
        ({"top_k": 100}, (False, True, False)),  # all of the vocabulary
        ({"top_p": 0.99}, (False, True, True)),
        ({"min_p": 0.01}, (False, True, True)),
        ({"repetition_penalty": 1.1}, (True, True, False)),
        ({"presence_penalty": -0.1}, (True, True, False)),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, (True, False, False)),
    ],
)
def test_the_host_knows_what_no_row_asks_for(state, changes, hints):
    plain = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
    state.set_rows([0], [plain])
    state.set_rows([1], [SamplingParams(seed=0, max_tokens=1, **changes)])
    out = LAYOUT.arrays(torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8))
    got, _ = _write(state, [0, 1], [0, 0], out)
    assert (got.any_penalised, got.any_random, got.any_filtered) == hints
    assert state.is_penalised(1) == hints[0]
    got, _ = _write(state, [0], [0], out)
    assert (got.any_penalised, got.any_random, got.any_filtered) == (False, False, False)


def test_a_row_that_changes_changes_the_version(state):
    version = state.version
    state.set_rows([0], [SamplingParams(seed=0, max_tokens=1)])
    assert state.version != version
