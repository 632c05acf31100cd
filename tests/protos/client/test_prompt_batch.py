"""Which prompt is sent when, and where its outcome goes. The clock is a number here."""

import random

import grpc
import pytest

from chairlift.client.errors import FieldViolation, GenerationError
from chairlift.client.prompt_batch import PromptBatch
from chairlift.v1 import generation_service_pb2 as pb


def batch_of(num_prompts, *, max_in_flight=2, return_errors=False):
    prompts = [f"prompt {index}" for index in range(num_prompts)]
    return PromptBatch(prompts, None, max_in_flight=max_in_flight, return_errors=return_errors)


def answer(text):
    usage = pb.Usage(num_output_tokens=len(text))
    return pb.GenerateResponse(text=text, finished=pb.Finished(usage=usage))


def error(retry_delay_s=None):
    return GenerationError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_delay_s=retry_delay_s)


def test_no_more_than_the_bound_are_in_flight_and_never_fewer_while_prompts_are_left():
    batch = batch_of(5)
    assert batch.take_due(0.0) == [0, 1]
    assert batch.take_due(0.0) == []
    assert batch.wait_s(0.0) is None
    batch.answered(1, answer("b"))
    assert batch.take_due(0.0) == [2]
    batch.answered(0, answer("a"))
    batch.answered(2, answer("c"))
    assert batch.take_due(0.0) == [3, 4]


def test_outcomes_are_in_the_order_of_the_prompts():
    batch = batch_of(3, max_in_flight=3)
    for index in batch.take_due(0.0)[::-1]:
        assert not batch.complete
        batch.answered(index, answer("abc"[index]))
    assert batch.complete
    assert [outcome.text for outcome in batch.outcomes()] == ["a", "b", "c"]
    assert batch.num_output_tokens == 3


def test_tokens_of_all_answers_are_counted():
    batch = batch_of(1)
    several = answer("abc")
    several.other_answers.add(finished=pb.Finished(usage=pb.Usage(num_output_tokens=4)))
    batch.take_due(0.0)
    batch.answered(0, several)
    assert batch.num_output_tokens == 7


def test_no_prompts_are_complete_at_once():
    batch = batch_of(0)
    assert batch.complete
    assert batch.outcomes() == []


def test_prompt_is_sent_again_when_the_server_said_and_keeps_its_place_until_then():
    batch = batch_of(4)
    batch.take_due(0.0)
    batch.failed(0, error(retry_delay_s=10.0), 100.0)
    assert batch.take_due(100.0) == []  # nothing takes the place of the one that waits
    wait_s = batch.wait_s(100.0)
    assert 10.0 <= wait_s <= 15.0
    assert batch.take_due(109.9) == []
    assert batch.take_due(100.0 + wait_s) == [0]
    batch.answered(0, answer("a"))
    assert batch.take_due(120.0) == [2]


def test_a_prompt_with_a_ticket_comes_back_with_it_exactly_when_told():
    batch = batch_of(1)
    batch.take_due(0.0)
    refusal = GenerationError(grpc.StatusCode.RESOURCE_EXHAUSTED, "late", retry_delay_s=3.25, retry_ticket=b"ticket")
    batch.failed(0, refusal, 100.0)
    assert batch.take_due(103.2) == []
    assert batch.take_due(103.25) == [0]
    assert batch.requests[0].spec.latency_targets.retry_ticket == b"ticket"
    batch.failed(0, error(retry_delay_s=1.0), 103.3)  # refused again, without a slot
    assert batch.requests[0].spec.latency_targets.retry_ticket == b""


def test_a_ticket_that_is_not_accepted_is_dropped():
    batch = batch_of(1)
    batch.take_due(0.0)
    refusal = GenerationError(grpc.StatusCode.RESOURCE_EXHAUSTED, "late", retry_delay_s=3.25, retry_ticket=b"ticket")
    batch.failed(0, refusal, 0.0)
    batch.take_due(60.0)
    expired = FieldViolation("spec.latency_targets.retry_ticket", "retry_ticket expired 51.75 s ago")
    batch.failed(0, GenerationError(grpc.StatusCode.INVALID_ARGUMENT, "-", field_violations=(expired,)), 60.0)
    assert batch.take_due(60.0) == [0]
    assert batch.requests[0].spec.latency_targets.retry_ticket == b""
    with pytest.raises(GenerationError):  # without a ticket the same error is the prompt's own
        batch.failed(0, GenerationError(grpc.StatusCode.INVALID_ARGUMENT, "-", field_violations=(expired,)), 60.0)


def test_refusals_come_to_an_end():
    batch = batch_of(1)
    batch.take_due(0.0)
    now_s, num_refusals = 0.0, 0
    with pytest.raises(GenerationError) as raised:  # noqa: PT012 - the last of many is the one that raises
        while True:
            num_refusals += 1
            batch.failed(0, error(retry_delay_s=10.0), now_s)
            now_s += batch.wait_s(now_s)
            assert batch.take_due(now_s) == [0]
    assert 300.0 <= now_s <= 315.0
    assert 20 < num_refusals < 33
    assert raised.value.__notes__ == ["prompt 0 of 1"]


def test_error_that_waiting_does_not_help_is_raised_with_its_prompt():
    batch = batch_of(3, max_in_flight=3)
    batch.take_due(0.0)
    with pytest.raises(GenerationError) as raised:
        batch.failed(1, error(), 0.0)
    assert raised.value.__notes__ == ["prompt 1 of 3"]


def test_error_takes_the_place_of_its_answer_if_asked_for():
    batch = batch_of(2, return_errors=True)
    batch.take_due(0.0)
    failure = error()
    batch.failed(0, failure, 0.0)
    batch.answered(1, answer("b"))
    assert batch.outcomes() == [failure, answer("b")]


def test_every_prompt_is_settled_once_whatever_happens():
    rng = random.Random(4)
    for _ in range(50):
        num_prompts, bound = rng.randrange(1, 30), rng.randrange(1, 8)
        batch = batch_of(num_prompts, max_in_flight=bound, return_errors=True)
        flying, now_s, expected = set(), 0.0, {}
        while not batch.complete:
            due = batch.take_due(now_s)
            assert not flying & set(due)
            assert not expected.keys() & set(due)
            flying |= set(due)
            assert len(flying) <= bound
            if not flying:
                now_s += batch.wait_s(now_s)
                continue
            index = rng.choice(sorted(flying))
            flying.remove(index)
            now_s += rng.random()
            match rng.randrange(3):
                case 0:
                    expected[index] = answer(str(index))
                    batch.answered(index, expected[index])
                case 1:
                    expected[index] = error()
                    batch.failed(index, expected[index], now_s)
                case _:
                    batch.failed(index, error(retry_delay_s=rng.random()), now_s)
        assert batch.outcomes() == [expected[index] for index in range(num_prompts)]


def test_prompt_forms_and_params_of_each():
    prompts = ["text", [1, 2], [("user", "hi")], []]
    params = [{"seed": 0}, {"seed": 1}, {"seed": 2}, {}]
    batch = PromptBatch(prompts, params, max_in_flight=9, return_errors=False)
    specs = [request.spec for request in batch.requests]
    assert [spec.WhichOneof("prompt") for spec in specs] == ["text", "token_ids", "chat", "token_ids"]
    assert list(specs[1].token_ids.ids) == [1, 2]
    assert specs[2].chat.messages[0].content == "hi"
    assert [spec.sampling.seed for spec in specs[:3]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ("abc", None, "prompts is one string"),
        (["a", "b"], [{}], "2 prompts and 1 params"),
        (["a"], {"max_token": 1}, "unknown argument 'max_token'"),
        (["a", "b"], {"text": "c"}, "params holds a prompt, 'text'"),
        ([[1]], {"chat": [("user", "x")]}, "params holds a prompt, 'chat'"),
    ],
)
def test_mistakes_are_found_before_anything_is_sent(prompts, params, says):
    with pytest.raises(TypeError, match=says):
        PromptBatch(prompts, params, max_in_flight=1, return_errors=False)


def test_options_of_requests_are_no_options_of_the_batch():
    with pytest.raises(TypeError, match="max_tokens: options of requests go into params, a dictionary"):
        PromptBatch(["a"], None, return_errors=False, max_tokens=3)


def test_bound_below_one_is_refused():
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        PromptBatch(["a"], None, max_in_flight=0, return_errors=False)
