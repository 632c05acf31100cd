"""Log-probabilities of a prompt, collected from parts of any size."""

import itertools

import pytest

from frontend.routing.logprobs import LogprobBatch, PromptLogprobs


def columns(start, stop, width=2):
    """Returns the columns of the tokens from `start` to `stop`; every value identifies its token."""
    tokens = range(start, stop)
    return LogprobBatch(
        width,
        [-float(token) for token in tokens],
        [token * 10 + rank for token in tokens for rank in range(width)],
        [-token - rank / 4 for token in tokens for rank in range(width)],
    )


def joined(gathered):
    """Returns all columns, read in pieces of at most two tokens."""
    whole = LogprobBatch()
    for piece in gathered.pieces(2):
        assert 1 <= len(piece.chosen) <= 2
        whole.extend(piece)
    return whole


@pytest.mark.parametrize("cuts", [cuts for n in range(5) for cuts in itertools.combinations(range(2, 6), n)])
def test_parts_of_any_size_are_joined(cuts):
    gathered = PromptLogprobs(top_width=2, num_prompt_tokens=6)
    for start, stop in itertools.pairwise([1, *cuts, 6]):
        assert gathered.num_missing == 6 - start
        gathered.add(start, columns(start, stop))
    assert gathered.num_missing == 0
    assert joined(gathered) == columns(1, 6)


def test_known_tokens_of_a_prompt_are_dropped():
    gathered = PromptLogprobs(top_width=2, num_prompt_tokens=6)
    for start, stop in [(1, 4), (1, 3), (2, 6), (1, 6)]:
        gathered.add(start, columns(start, stop))
    assert joined(gathered) == columns(1, 6)


def test_prompt_of_one_token_has_none():
    assert PromptLogprobs(top_width=3, num_prompt_tokens=1).num_missing == 0


WRONG = [
    (0, columns(0, 3), "from 0 on, when 1 was next"),
    (2, columns(2, 4), "from 2 on, when 1 was next"),
    (1, columns(1, 7), "of 6 tokens from 1 on"),
    (1, columns(1, 4, width=1), "width 1"),
    (1, LogprobBatch(2, [-1.0, -2.0], [1, 2, 3], [0.0] * 4), "with 3 ids and 4 values"),
    (1, LogprobBatch(2, [-1.0, -2.0], [1, 2, 3, 4], [0.0] * 5), "with 4 ids and 5 values"),
]


@pytest.mark.parametrize(("start", "batch", "words"), WRONG)
def test_missing_surplus_and_wrong_width_are_rejected(start, batch, words):
    gathered = PromptLogprobs(top_width=2, num_prompt_tokens=6)
    with pytest.raises(ValueError, match=words):
        gathered.add(start, batch)
    assert gathered.num_missing == 5
