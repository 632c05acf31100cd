"""Constraints of a submission, and errors in them."""

import numpy as np
import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import MAX_GRAMMAR_CHARS
from engine.constraints.token_bits import all_words, num_words, words_of
from engine.core.request import RequestId
from engine.errors import InvalidRequest
from engine.serving.convert import RequestLimits, request_from_submission
from engine.serving.convert_constraint import (
    MAX_BAD_SEQUENCE_IDS,
    MAX_BAD_SEQUENCES,
    constraint_from_submission,
)
from tests.support.engine.client import submission

VOCAB_SIZE = 1000
BEYOND = 5000  # an end token of the model that its vocabulary does not have
LIMITS = RequestLimits(VOCAB_SIZE, max_logprobs=5, end_token_ids=frozenset({2, 3, BEYOND}))


class Anything:
    error = ""

    def accept(self, token_ids):
        pass

    def fill(self, words):
        words[:] = all_words(VOCAB_SIZE)


def convert(message):
    return request_from_submission(message, RequestId(7), LIMITS, now_s=100.0)


def constrained(allowed_token_ids=(), bad_sequences=(), **fields):
    message = submission(1, [1], **fields)
    message.sampling.allowed_token_ids.extend(allowed_token_ids)
    for token_ids in bad_sequences:
        message.sampling.bad_sequences.add(token_ids=token_ids)
    return message


def drawable(constraint):
    words = np.zeros(num_words(VOCAB_SIZE), dtype=np.int32)
    constraint.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_most_requests_have_no_constraint():
    assert convert(submission(1, [1])).constraint is None


def test_allowed_tokens_and_bad_sequences_are_converted():
    constraint = convert(constrained([5, 999, 7], [[7], [5, 999]])).constraint
    assert drawable(constraint) == {5, 999}
    constraint.accept([5])
    assert drawable(constraint) == {5}


def test_under_a_grammar_ends_are_held_back_and_not_forbidden():
    message = constrained(grammar="any", stops=pb.TokenStops(max_tokens=9, min_tokens=4, stop_token_ids=[8, 3]))
    message.stops.ignore_end_token = True
    params = convert(message).params
    assert (params.min_tokens, params.ignore_end_token, params.stop_token_ids) == (0, False, (8, 3))
    constraint = constraint_from_submission(message, VOCAB_SIZE, LIMITS.end_token_ids, Anything())
    everything = set(range(VOCAB_SIZE))
    assert drawable(constraint) == everything - {2, 3, 8}
    constraint.accept([9] * 4)
    assert drawable(constraint) == everything - {2, 3}
    message.stops.ignore_end_token = False
    constraint = constraint_from_submission(message, VOCAB_SIZE, LIMITS.end_token_ids, Anything())
    constraint.accept([9] * 4)
    assert drawable(constraint) == everything


def test_without_a_grammar_min_tokens_and_ignored_ends_stay_what_they_were():
    message = constrained([2, 5], stops=pb.TokenStops(max_tokens=9, min_tokens=4))
    message.stops.ignore_end_token = True
    request = convert(message)
    assert (request.params.min_tokens, request.params.ignore_end_token) == (4, True)
    assert drawable(request.constraint) == {2, 5}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (constrained([5, 1000]), "allowed_token_ids contains token id 1000, the vocabulary has 1000"),
        (constrained([5] * 65537), "allowed_token_ids has 65537 entries, at most 65536"),
        (constrained(bad_sequences=[[1], []]), r"bad_sequences\[1\] has no ids"),
        (constrained(bad_sequences=[[1], [4, 1000]]), r"bad_sequences\[1\] contains token id 1000"),
        (
            constrained(bad_sequences=[[1] * (MAX_BAD_SEQUENCE_IDS + 1)]),
            r"bad_sequences\[0\] has 1025 ids, at most 1024",
        ),
        (constrained(bad_sequences=[[1]] * (MAX_BAD_SEQUENCES + 1)), "bad_sequences has 129 sequences, at most 128"),
        (constrained(grammar="x" * (MAX_GRAMMAR_CHARS + 1)), "grammar has 262145 characters, at most 262144"),
    ],
)
def test_what_cannot_be_served_is_named_with_its_numbers(message, error):
    with pytest.raises(InvalidRequest, match=error):
        convert(message)


def test_the_limits_themselves_are_served():
    bad = [[1] * MAX_BAD_SEQUENCE_IDS] * MAX_BAD_SEQUENCES
    request = convert(constrained(range(VOCAB_SIZE), bad, grammar="x" * MAX_GRAMMAR_CHARS))
    words = np.zeros(num_words(VOCAB_SIZE), dtype=np.int32)
    request.constraint.fill(words)
    assert words.tolist() == words_of(range(VOCAB_SIZE), VOCAB_SIZE).tolist()
