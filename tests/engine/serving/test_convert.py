"""Every value a frontend can get wrong becomes an InvalidRequest that names the field and the numbers."""

import math
from collections.abc import Callable

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.request import Request, RequestId
from engine.errors import InvalidRequest
from engine.serving.convert import (
    RequestLimits,
    request_from_submission,
)
from tests.support.engine.client import submission

LIMITS = RequestLimits(vocab_size=1000, max_logprobs=5)


def convert(message: pb.Submission) -> Request:
    return request_from_submission(message, RequestId(7), LIMITS, now_s=100.0)


def test_every_field_arrives() -> None:
    message = pb.Submission(
        handle=3,
        prompt_ids=b"\x01\0\0\0\xe7\x03\0\0",
        output_ids=b"\x05\0\0\0",
        start_index=1,
        sampling=pb.Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            seed=2**64 - 1,
            bias_ids=[999, 4],
            bias_values=[-100.0, 1.5],
        ),
        stops=pb.TokenStops(
            max_tokens=9, min_tokens=2, stop_token_ids=[8, 999], ignore_end_token=True, time_budget_ms=250
        ),
        remaining_ms=1500,
        epoch=2,
        waited_ms=2500,
        priority=-3,
        cache_salt=b"salt",
        token_credit=64,
        top_logprobs=5,
        prompt_logprobs=3,
        request_id="abc",
    )
    request = convert(message)
    assert request.request_id == 7
    assert request.prompt_ids == (1, 999)
    assert request.output_ids == [5]
    assert request.num_prior_output_tokens == 1
    assert (request.arrival_s, request.deadline_s, request.budget_end_s) == (100.0, 101.5, 100.25)
    assert (request.priority, request.cache_salt, request.token_credit, request.label) == (-3, b"salt", 64, "abc")
    assert (request.has_moved, request.waited_s) == (True, 2.5)
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 40, 0.125)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, -2.0, 2.0)
    assert params.seed == 2**64 - 1
    assert params.logit_bias == ((999, -100.0), (4, 1.5))
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids, params.ignore_end_token) == (
        9,
        2,
        (8, 999),
        True,
    )
    assert (params.top_logprobs, params.prompt_logprobs) == (5, 3)


def test_absent_values_mean_none() -> None:
    request = convert(submission(1, [1]))
    assert request.deadline_s is request.budget_end_s is None
    assert request.token_credit is None
    assert request.params.top_logprobs is request.params.prompt_logprobs is None


def test_top_k_of_the_whole_vocabulary_is_off() -> None:
    message = submission(1, [1])
    message.sampling.top_k = 1000
    assert convert(message).params.top_k == 0


def _set(path: str, value: object) -> Callable[[pb.Submission], None]:
    def change(message: pb.Submission) -> None:
        *parents, name = path.split(".")
        target: object = message
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, list):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("prompt_ids", b""), ["prompt_ids", "empty"]),
        (_set("prompt_ids", b"\0\0\0\0\0"), ["prompt_ids", "5 bytes"]),
        (_set("prompt_ids", b"\xe8\x03\0\0"), ["prompt_ids", "1000"]),
        (_set("prompt_ids", b"\xff\xff\xff\xff"), ["prompt_ids", "4294967295", "1000"]),
        (_set("output_ids", b"\xe8\x03\0\0"), ["output_ids", "1000"]),
        (_set("output_ids", b"\0\0\0"), ["output_ids", "3 bytes"]),
        (_set("output_ids", b"\0\0\0\0"), ["start_index is 0", "1 tokens"]),
        (_set("start_index", 2), ["start_index is 2", "0 tokens"]),
        (_set("sampling.temperature", -0.5), ["sampling.temperature", "-0.5"]),
        (_set("sampling.temperature", math.nan), ["sampling.temperature", "nan"]),
        (_set("sampling.temperature", math.inf), ["sampling.temperature", "inf"]),
        (_set("sampling.temperature", 100.5), ["sampling.temperature", "100.5", "at most 100"]),
        (_set("sampling.top_p", 0.0), ["sampling.top_p", "0", "above 0"]),
        (_set("sampling.top_p", 1.5), ["sampling.top_p", "1.5", "at most 1"]),
        (_set("sampling.top_p", math.nan), ["sampling.top_p", "nan"]),
        (_set("sampling.min_p", -1.0), ["sampling.min_p", "-1"]),
        (_set("sampling.min_p", 1.25), ["sampling.min_p", "1.25"]),
        (_set("sampling.repetition_penalty", 0.0), ["sampling.repetition_penalty", "0"]),
        (_set("sampling.repetition_penalty", 1e-38), ["sampling.repetition_penalty", "1e-38", "at least 0.1"]),
        (_set("sampling.repetition_penalty", 10.5), ["sampling.repetition_penalty", "10.5", "at most 10"]),
        (_set("sampling.repetition_penalty", math.inf), ["sampling.repetition_penalty", "inf"]),
        (_set("sampling.presence_penalty", 2.5), ["sampling.presence_penalty", "2.5"]),
        (_set("sampling.frequency_penalty", -2.5), ["sampling.frequency_penalty", "-2.5"]),
        (_set("sampling.bias_ids", [1]), ["bias_ids has 1", "bias_values 0"]),
        (_set("stops.max_tokens", 0), ["stops.max_tokens is 0"]),
        (_set("stops.min_tokens", 17), ["stops.min_tokens is 17", "16"]),
        (_set("stops.stop_token_ids", [5, 1000]), ["stops.stop_token_ids", "1000"]),
        (_set("stops.stop_token_ids", [1] * 65), ["stops.stop_token_ids", "65 entries", "at most 64"]),
        (_set("top_logprobs", 6), ["top_logprobs is 6", "5"]),
        (_set("prompt_logprobs", 6), ["prompt_logprobs is 6", "5"]),
        (_set("cache_salt", b"x" * 1025), ["cache_salt", "1025"]),
        (_set("request_id", "x" * 257), ["request_id", "257"]),
        (lambda message: message.ClearField("sampling"), ["sampling is missing"]),
        (lambda message: message.ClearField("stops"), ["stops is missing"]),
    ],
)
def test_bad_values_are_named(change: Callable[[pb.Submission], None], words: list[str]) -> None:
    message = submission(1, [1, 2, 3])
    change(message)
    with pytest.raises(InvalidRequest) as caught:
        convert(message)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("bias_ids", "bias_values", "words"),
    [
        ([1000], [0.0], ["logit_bias", "1000"]),
        ([1, 1], [0.0, 1.0], ["names a token twice"]),
        ([1], [math.nan], ["logit_bias", "nan"]),
        ([1], [100.5], ["logit_bias", "100.5"]),
        (range(301), [0.0] * 301, ["logit_bias", "301 entries", "at most 300"]),
    ],
)
def test_bad_biases_are_named(bias_ids: list[int], bias_values: list[float], words: list[str]) -> None:
    message = submission(1, [1])
    message.sampling.bias_ids.extend(bias_ids)
    message.sampling.bias_values.extend(bias_values)
    with pytest.raises(InvalidRequest) as caught:
        request_from_submission(message, RequestId(1), RequestLimits(1000 if len(bias_ids) < 9 else 9999, 5), 0.0)
    for word in words:
        assert word in str(caught.value)
