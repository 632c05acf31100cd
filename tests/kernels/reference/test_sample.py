"""The sampling rules against results computed by hand."""

import math

import pytest
import torch

from kernels.reference.sample import adjusted_logits, kept_tokens, sample
from kernels.sampling import RowStatus

NAN, INF = math.nan, math.inf


def _adjusted(sampling_batch, logits, **row):
    return adjusted_logits(torch.tensor(logits), sampling_batch([row]), 0).tolist()


def test_repetition_penalty_shrinks_what_was_seen_in_prompt_or_output(sampling_batch):
    got = _adjusted(sampling_batch, [4.0, -4.0, 4.0, -4.0], prompt=[0, 0], output=[1], repetition_penalty=2.0)
    assert got == [2.0, -8.0, 4.0, -4.0]


def test_presence_and_frequency_penalties_look_at_the_output_only(sampling_batch):
    row = {"prompt": [0, 1, 1], "output": [2, 3, 3], "presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert _adjusted(sampling_batch, [1.0, 1.0, 1.0, 1.0], **row) == [1.0, 1.0, 0.25, 0.0]


def test_bias_is_added_after_the_penalties(sampling_batch):
    row = {"prompt": [0], "repetition_penalty": 2.0, "bias": {0: 3.0, 2: -INF}}
    assert _adjusted(sampling_batch, [4.0, 1.0, 9.0], **row) == [5.0, 1.0, -INF]


def _sampled(sampling_batch, logits, **row):
    return sample(torch.tensor([logits]), sampling_batch([row]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask_overrides_logits_and_biases(sampling_batch, temperature):
    row = {"prompt": [0], "repetition_penalty": 0.5, "bias": {0: 90.0, 3: 90.0, 33: 1.0}, "temperature": temperature}
    got = _sampled(sampling_batch, [50.0, 1.0, 0.0] + [0.0] * 37, allowed=[2, 33], **row)
    assert got.token_ids.tolist() == [33]


def test_mask_of_all_tokens_fails_its_row(sampling_batch):
    got = sample(torch.zeros(3, 40), sampling_batch([{"allowed": []}, {}, {"allowed": [39]}]))
    assert got.status.tolist() == [RowStatus.NO_CANDIDATE, RowStatus.OK, RowStatus.OK]
    assert got.token_ids[2] == 39


def test_mask_does_not_hide_bad_logits(sampling_batch):
    assert _sampled(sampling_batch, [0.0, NAN], allowed=[0]).status[0] == RowStatus.BAD_LOGITS
    row = {"prompt": [1], "repetition_penalty": 0.1}
    assert _sampled(sampling_batch, [0.0, 3e38], allowed=[0], **row).status[0] == RowStatus.BAD_LOGITS


def test_a_forced_row_becomes_its_token_with_its_raw_logprob(sampling_batch):
    logits = [0.0, math.log(3), 0.0, -INF]
    row = {"temperature": 1.0, "top_k": 1, "bias": {1: 9.0}, "allowed": [0], "top_logprobs": 2}
    got = _sampled(sampling_batch, logits, forced=2, **row)
    assert got.token_ids.tolist() == [2]
    assert got.logprobs[0] == pytest.approx(math.log(1 / 5))
    assert got.top_ids[0].tolist() == [1, 0]
    assert _sampled(sampling_batch, logits, forced=3, top_logprobs=0).logprobs.tolist() == [-INF]


def test_a_forced_row_fails_where_others_do(sampling_batch):
    assert _sampled(sampling_batch, [0.0, NAN], forced=0).status[0] == RowStatus.BAD_LOGITS
    assert _sampled(sampling_batch, [-INF, -INF], forced=0).status[0] == RowStatus.NO_CANDIDATE


PROBABILITIES = [0.5, 0.2, 0.15, 0.1, 0.05]


@pytest.mark.parametrize(
    ("filters", "want"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.39}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        # renormalised to the best three, 0.5 is 0.59 and the best two are 0.82
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),
        ({"top_k": 3, "top_p": 0.84}, [0, 1, 2]),
        ({"min_p": 0.25, "top_p": 0.8}, [0, 1]),
        ({"min_p": 0.25, "top_k": 4}, [0, 1, 2]),
        # at temperature 0.5 the probabilities are squared: 0.768, 0.123, 0.069, ...
        ({"temperature": 0.5, "top_p": 0.75}, [0]),
        ({"temperature": 0.5, "top_p": 0.88}, [0, 1]),
        ({"temperature": 0.5, "min_p": 0.17}, [0]),
    ],
)
def test_filters(filters, want):
    arguments = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    order = [3, 0, 4, 1, 2]
    logits = torch.empty(5)
    logits[order] = torch.tensor(PROBABILITIES).log() + 7.0
    ids, _ = kept_tokens(logits, **arguments)
    assert [order.index(i) for i in ids.tolist()] == want


def test_equal_logits_are_kept_by_lowest_id():
    logits = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, -0.0])
    for top_k, want in [(1, [1]), (2, [1, 3]), (3, [1, 3, 0]), (4, [1, 3, 0, 2]), (6, [1, 3, 0, 2, 4, 5])]:
        assert kept_tokens(logits, 1.0, top_k, 1.0, 0.0)[0].tolist() == want
    assert kept_tokens(torch.zeros(10), 1.0, 0, 0.35, 0.0)[0].tolist() == [0, 1, 2, 3]


def test_forbidden_tokens_are_never_kept():
    logits = torch.tensor([-INF, 0.0, -INF, 0.0])
    assert kept_tokens(logits, 1.0, 3, 1.0, 0.0)[0].tolist() == [1, 3]
    assert kept_tokens(logits, 1.0, 0, 0.999, 0.0)[0].tolist() == [1, 3]


def test_greedy_takes_the_first_of_the_best(sampling_batch):
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    assert sample(logits, sampling_batch([{"temperature": 0.0}] * 2)).token_ids.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("logits", "row", "status"),
    [
        ([0.0, NAN], {}, RowStatus.BAD_LOGITS),
        ([0.0, INF], {"temperature": 0.0}, RowStatus.BAD_LOGITS),
        ([3e38, 0.0], {"prompt": [0], "repetition_penalty": 0.1}, RowStatus.BAD_LOGITS),
        ([-INF, -INF], {}, RowStatus.NO_CANDIDATE),
        ([1.0, 2.0], {"bias": {0: -INF, 1: -INF}, "temperature": 0.0}, RowStatus.NO_CANDIDATE),
    ],
)
def test_bad_row_fails_alone(sampling_batch, logits, row, status):
    logits = torch.tensor([[1.0, 2.0], logits, [2.0, 1.0]])
    rows = [{"temperature": 0.0, "top_logprobs": 1}, {**row, "top_logprobs": 1}, {}]
    got = sample(logits, sampling_batch(rows))
    assert got.status.tolist() == [0, status, 0]
    assert got.token_ids[:2].tolist() == [1, -1]
    assert got.top_ids.tolist() == [[1], [-1], [-1]]
    assert got.logprobs.isnan().tolist() == [False, True, True]


def test_logprobs_are_raw(sampling_batch):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    row = {"temperature": 0.0, "bias": {0: 9.0}, "prompt": [1], "repetition_penalty": 3.0, "top_logprobs": 3}
    got = sample(logits, sampling_batch([row]))
    want = logits[0].double().log_softmax(0)
    assert got.token_ids.tolist() == [0]
    assert got.logprobs[0] == want[0]
    assert got.top_ids.tolist() == [[1, 2, 3]]
    assert torch.equal(got.top_values[0], want[[1, 2, 3]])
