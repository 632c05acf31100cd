"""What is asked of an engine for a request that begins, or that goes on after another engine was lost."""

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.routing import wire
from frontend.routing.foreign.continuation import continuation_of, finished_reason


def submission(output_ids=(), *, grammar="", max_tokens=10, min_tokens=4, stops=(), ignore_end=False, **sampling):
    return pb.Submission(
        prompt_ids=wire.ids_to_bytes([1, 2, 3]),
        output_ids=wire.ids_to_bytes(output_ids),
        start_index=len(output_ids),
        grammar=grammar,
        sampling=pb.Sampling(**sampling),
        stops=pb.TokenStops(
            max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stops, ignore_end_token=ignore_end
        ),
    )


def test_a_new_request_is_asked_as_it_is():
    rest = continuation_of(submission(seed=7, bias_ids=[5], bias_values=[1.5]))
    assert (list(rest.prompt_ids), rest.max_tokens, rest.min_tokens) == ([1, 2, 3], 10, 4)
    assert (rest.seed, rest.logit_bias, list(rest.replayed_ids)) == (7, {5: 1.5}, [])


def test_tokens_so_far_follow_the_prompt():
    rest = continuation_of(submission([8, 9], seed=7))
    assert (list(rest.prompt_ids), rest.max_tokens, rest.min_tokens) == ([1, 2, 3, 8, 9], 8, 2)
    assert rest.seed not in (7, continuation_of(submission([8], seed=7)).seed)
    assert rest.seed == continuation_of(submission([4, 4], seed=7)).seed


def test_penalties_become_biases_within_their_range():
    rest = continuation_of(
        submission([8, 9, 8], frequency_penalty=1.0, presence_penalty=0.5, bias_ids=[8, 9], bias_values=[-99, 0.25])
    )
    assert rest.logit_bias == {8: -100.0, 9: -1.25}


def test_an_answer_with_a_grammar_is_replayed():
    rest = continuation_of(submission([8, 9], grammar="g", seed=7, frequency_penalty=1.0))
    assert (list(rest.prompt_ids), list(rest.replayed_ids), rest.max_tokens) == ([1, 2, 3], [8, 9], 10)
    assert (rest.seed, rest.logit_bias) == (7, {})


@pytest.mark.parametrize(
    ("request_fields", "reason"),
    [
        ({"output_ids": [5] * 9}, None),
        ({"output_ids": [5] * 10}, pb.COMPLETION_REASON_MAX_TOKENS),
        ({"output_ids": [5, 5, 5, 5, 6]}, pb.COMPLETION_REASON_END_TOKEN),
        ({"output_ids": [5, 5, 6]}, None),  # before min_tokens
        ({"output_ids": [5, 5, 5, 5, 6], "ignore_end": True}, None),
        ({"output_ids": [5] * 4 + [7], "stops": [7]}, pb.COMPLETION_REASON_STOP_TOKEN),
        ({"output_ids": [5] * 17, "max_tokens": 50}, pb.COMPLETION_REASON_CONTEXT_FULL),
    ],
)
def test_answers_that_had_ended_are_known(request_fields, reason):
    assert finished_reason(submission(**request_fields), [6], 20) == reason
