"""Answers that end when their time budget is used up."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.fake_engine import FakeEngine

ENDLESS = {"max_tokens": 4000, "ignore_end_token": True}
BUDGET = Duration(seconds=10)


def milliseconds(number):
    return Duration(nanos=number * 1_000_000)


async def collect(call):
    return [message async for message in call]


def kinds(messages):
    return [message.WhichOneof("event") for message in messages]


async def test_answer_ends_with_its_text_so_far(skip, pair, text_request):
    pair.engine.pause()
    request = text_request("abc", time_budget=BUDGET, **ENDLESS)
    waiting = asyncio.ensure_future(collect(pair.stub().StreamGenerate(request)))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    for _ in range(7):
        await pair.engine.step()
    skip(BUDGET.seconds)
    await pair.engine.step()
    messages = await waiting
    assert kinds(messages)[0] == "started"
    assert messages[0].started.effective_stop.time_budget == BUDGET
    assert "".join(message.chunk.text for message in messages) == "abcabc"  # and the end token between them
    finished = messages[-1].finished
    assert finished.reason == pb.FINISH_REASON_TIME_BUDGET
    assert finished.usage.num_output_tokens == sum(message.chunk.num_tokens for message in messages) == 7
    assert finished.timing.total.seconds >= BUDGET.seconds


async def test_budget_runs_from_acceptance(skip, make_pair, text_request):
    """What tokenizing has taken is gone."""
    pair = await make_pair()
    tokenizer = pair.app.engines.attachment().model.tokenizer
    encode = tokenizer.encode

    async def slow(text, **options):
        skip(400.0)
        return await encode(text, **options)

    tokenizer.encode = slow
    await collect(pair.stub().StreamGenerate(text_request("abc", time_budget=Duration(seconds=1000))))
    (submission,) = pair.engine.submissions
    assert 0 < submission.stops.time_budget_ms <= 600_000
    assert not submission.HasField("remaining_ms")  # no deadline beside it, unless the client names one


async def test_answer_whose_time_is_used_up_before_the_engine_has_it_is_empty(make_pair, text_request):
    pair = await make_pair()
    tokenizer = pair.app.engines.attachment().model.tokenizer
    encode = tokenizer.encode

    async def slow(text, **options):
        await asyncio.sleep(0.01)
        return await encode(text, **options)

    tokenizer.encode = slow
    messages = await collect(pair.stub().StreamGenerate(text_request("abc", time_budget=milliseconds(5))))
    assert kinds(messages) == ["started", "finished"]
    assert pair.engine.submissions[0].stops.HasField("time_budget_ms")
    assert pair.engine.submissions[0].stops.time_budget_ms == 0
    finished = messages[-1].finished
    assert (finished.reason, finished.usage.num_output_tokens) == (pb.FINISH_REASON_TIME_BUDGET, 0)
    assert finished.usage.num_prompt_tokens == 3
    assert not finished.timing.HasField("first_token")


async def test_request_that_never_began_ends_without_tokens(skip, pair, text_request):
    pair.engine.pause()
    call = pair.stub().Generate(pb.GenerateRequest(spec=text_request("abc", time_budget=BUDGET, **ENDLESS).spec))
    waiting = asyncio.ensure_future(collect_unary(call))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    skip(BUDGET.seconds)
    await pair.engine.step()
    answer = await waiting
    assert (answer.text, answer.finished.reason) == ("", pb.FINISH_REASON_TIME_BUDGET)
    assert answer.request_id


async def collect_unary(call):
    return await call


async def test_text_that_may_have_become_a_stop_text_comes_out_at_the_end(skip, pair, text_request):
    pair.engine.pause()
    request = text_request("abX", stop_texts=["abXc"], time_budget=BUDGET, max_tokens=3)
    waiting = asyncio.ensure_future(collect(pair.stub().StreamGenerate(request)))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    await pair.engine.step()
    await pair.engine.step()
    skip(BUDGET.seconds)
    await pair.engine.step()
    messages = await waiting
    assert messages[-1].finished.reason == pb.FINISH_REASON_TIME_BUDGET
    assert "".join(message.chunk.text for message in messages) == "ab"


async def test_answers_share_the_budget_and_unstarted_ones_are_empty(skip, pair, text_request):
    pair.engine.pause()
    request = text_request("abc", time_budget=BUDGET, **ENDLESS)
    request.spec.num_answers = 3
    waiting = asyncio.ensure_future(collect(pair.stub().StreamGenerate(request)))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    await pair.engine.step()
    await pair.engine.wait_for(lambda: pair.engine.num_open == 3)
    skip(BUDGET.seconds)
    await pair.engine.step()
    messages = await waiting
    finished = {message.finished.answer_index: message.finished for message in messages if message.HasField("finished")}
    assert {each.reason for each in finished.values()} == {pb.FINISH_REASON_TIME_BUDGET}
    assert [finished[index].usage.num_output_tokens for index in range(3)] == [1, 0, 0]
    budgets = [submission.stops.time_budget_ms for submission in pair.engine.submissions]
    assert budgets[0] >= max(budgets[1:])


async def test_earlier_deadline_wins_and_is_an_error(make_pair, text_request):
    pair = await make_pair(engine=FakeEngine(step_interval_s=0.01))
    request = text_request("abc", time_budget=Duration(seconds=20), **ENDLESS)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(pair.stub().StreamGenerate(request, timeout=0.1))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_end_by_budget_counts_as_length_and_has_no_first_token_if_there_was_none(skip, pair, text_request):
    pair.engine.pause()
    request = text_request("abc", time_budget=BUDGET, **ENDLESS)
    waiting = asyncio.ensure_future(collect(pair.stub().StreamGenerate(request)))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    skip(BUDGET.seconds)
    await pair.engine.step()
    await waiting
    await pair.idle()
    lines = pair.app.metrics.render().decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    labels = 'engine="0",model_name="fake"'
    counted = {name: value for name, value in values.items() if "request_success_total" in name and value}
    assert counted == {'chairlift:request_success_total{engine="0",finished_reason="length",model_name="fake"}': 1}
    assert values[f"chairlift:time_to_first_token_seconds_count{{{labels}}}"] == 0
    assert values[f"chairlift:request_decode_time_seconds_count{{{labels}}}"] == 0
    assert values[f"chairlift:request_queue_time_seconds_count{{{labels}}}"] == 1


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Duration(), "time_budget is 0 s, it must be above 0 and at most 86400 s"),
        (Duration(seconds=-1), "time_budget is -1 s"),
        (Duration(nanos=-1), "time_budget is -1e-09 s"),
        (Duration(seconds=86401), "time_budget is 86401 s"),
        (Duration(seconds=2**62), "time_budget is 4.61169e"),
        (Duration(seconds=1, nanos=2**30), "time_budget has 1 seconds and 1073741824 nanos"),
        (Duration(seconds=1, nanos=-1), "time_budget has 1 seconds and -1 nanos"),
    ],
)
async def test_budgets_out_of_range_are_refused_with_the_numbers(pair, text_request, budget, message):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(pair.stub().StreamGenerate(text_request("abc", time_budget=budget)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(message)
