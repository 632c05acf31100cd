"""Metrics of requests that end in different ways over gRPC: each is counted once and billed for the tokens sent."""

import asyncio
from collections import Counter

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from tests.hang import HANG_S
from tests.support.frontend.calls import failure
from tests.support.frontend.fake_engine import FakeEngine, rejection


async def status_of(call):
    return (await failure(call)).code()


async def read_all(call):
    """Returns the number of tokens received."""
    return sum([message.chunk.num_tokens async for message in call])


async def until(condition):
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("text", "stop", "outcome"),
    [
        ("abc", {}, "stop"),
        ("abc", {"stop_token_ids": [ord("b")]}, "stop"),
        ("abcdef", {"stop_texts": ["cd"]}, "stop"),
        ("abc", {"max_tokens": 2}, "length"),
        ("x" * 30, {"max_tokens": 10, "ignore_end_token": True}, "length"),  # fills the context
    ],
)
async def test_complete_answer_counts_as_stop_or_length_and_its_usage_is_billed(
    make_pair, text_request, ended, billed, scrape, text, stop, outcome
):
    pair = await make_pair(engine=FakeEngine(max_model_len=40))
    request = text_request(text, **stop)
    messages = [message async for message in pair.stub().StreamGenerate(request)]
    usage = messages[-1].finished.usage
    assert sum(message.chunk.num_tokens for message in messages) == usage.num_output_tokens
    for num_requests in (1, 2):
        await pair.idle()
        assert ended(pair) == {outcome: num_requests}
        assert billed(pair) == (num_requests * usage.num_prompt_tokens, num_requests * usage.num_output_tokens)
        metrics = pair.app.metrics
        assert usage.num_cached_tokens == 1
        assert scrape(metrics, "chairlift:prompt_tokens_cached_total") == num_requests
        num_gaps = num_requests * (usage.num_output_tokens - 1)
        assert scrape(metrics, "chairlift:inter_token_latency_seconds_count") == num_gaps
        for name in (
            *("e2e_request_latency", "time_to_first_token", "request_decode_time", "request_queue_time"),
            "request_inference_time",
        ):
            assert scrape(metrics, f"chairlift:{name}_seconds_count") == num_requests, name
        if num_requests == 1:
            answer = await pair.stub().Generate(pb.GenerateRequest(spec=request.spec))
            assert answer.finished.usage == usage


async def test_client_that_leaves_while_queued_counts_as_cancelled_and_is_billed_nothing(
    pair, text_request, ended, billed
):
    pair.engine.pause()
    request = text_request("abc")
    calls = [pair.stub().StreamGenerate(request), pair.stub().Generate(pb.GenerateRequest(spec=request.spec))]
    await pair.engine.wait_for(lambda: pair.engine.num_open == 2)
    assert ended(pair) == {}
    for call in calls:
        call.cancel()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 2)
    pair.engine.resume()
    await pair.idle()
    assert ended(pair) == {"cancelled": 2}
    assert billed(pair) == (0, 0)


async def test_client_that_leaves_a_stream_is_billed_for_the_tokens_sent(pair, text_request, ended, billed, scrape):
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abcdef"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    for _ in range(3):
        await pair.engine.step()
    assert (await call.read()).HasField("started")
    num_read = 0
    while num_read < 3:
        num_read += (await call.read()).chunk.num_tokens
    await until(lambda: billed(pair) == (6, 3))
    call.cancel()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 1)
    pair.engine.resume()
    await pair.idle()
    assert ended(pair) == {"cancelled": 1}
    assert billed(pair) == (6, 3)
    assert scrape(pair.app.metrics, "chairlift:e2e_request_latency_seconds_count") == 0
    assert scrape(pair.app.metrics, "chairlift:request_queue_time_seconds_count") == 1  # the engine ran it


async def test_client_that_leaves_a_unary_call_is_billed_nothing(pair, text_request, ended, billed, scrape):
    pair.engine.pause()
    call = pair.stub().Generate(pb.GenerateRequest(spec=text_request("abcdef").spec))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    for _ in range(3):
        await pair.engine.step()
    await until(lambda: scrape(pair.app.metrics, "chairlift:time_to_first_token_seconds_count") == 1)
    call.cancel()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 1)
    pair.engine.resume()
    await pair.idle()
    assert ended(pair) == {"cancelled": 1}
    assert billed(pair) == (0, 0)


async def test_deadline_counts_whether_the_engine_or_grpc_reports_it(pair, text_request, ended, monkeypatch):
    def late(step):
        for completion in step.completions:
            completion.reason = engine_pb.COMPLETION_REASON_DEADLINE
        return [step]

    pair.engine.rewrite_step = late
    call = pair.stub().StreamGenerate(text_request("abc"), timeout=30)
    assert await status_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await pair.idle()
    assert ended(pair) == {"deadline": 1}

    async def endless(*args, **options):
        await asyncio.Event().wait()

    pair.engine.pause()
    calls = [pair.stub().StreamGenerate(text_request("abc"), timeout=5.0)]  # longer than a busy machine stalls
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    monkeypatch.setattr("frontend.generation.generation.tokenize", endless)
    calls.append(pair.stub().StreamGenerate(text_request("abc"), timeout=5.0))
    for call in calls:
        assert await status_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await pair.engine.wait_for(lambda: pair.engine.cancels == [(1, engine_pb.CANCEL_REASON_DEADLINE)])
    pair.engine.resume()
    await pair.idle()
    assert ended(pair) == {"deadline": 3}


async def test_rejections_by_full_queues_count_as_shed(make_pair, text_request, ended, billed):
    pair = await make_pair(max_queued_requests=2, max_queued_tokens=1000)
    pair.engine.pause()
    calls = [pair.stub().StreamGenerate(text_request("x" * 400)) for _ in range(2)]
    await pair.engine.wait_for(lambda: pair.engine.num_open == 2)
    assert await status_of(pair.stub().StreamGenerate(text_request("a"))) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ended(pair) == {"shed": 1}
    calls.pop().cancel()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 1)
    call = pair.stub().StreamGenerate(text_request("x" * 700))  # exceeds the limit once it is tokenized
    assert await status_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ended(pair) == {"cancelled": 1, "shed": 2}
    pair.engine.rejections = [rejection(engine_pb.REJECTION_REASON_QUEUE_FULL, "256 wait", retry_after_s=1)]
    assert await status_of(pair.stub().StreamGenerate(text_request("b"))) is grpc.StatusCode.RESOURCE_EXHAUSTED
    pair.engine.resume()
    assert await read_all(calls[0]) == 256
    await pair.idle()
    assert ended(pair) == {"cancelled": 1, "shed": 3, "length": 1}
    assert billed(pair) == (400, 256)


async def test_failures_of_the_engine_and_defects_count_as_errors(make_pair, text_request, ended, monkeypatch):
    pair = await make_pair(failover_timeout_s=0)

    def broken(step):
        for completion in step.completions:
            completion.reason = engine_pb.COMPLETION_REASON_ENGINE_ERROR
        return [step]

    pair.engine.rewrite_step = broken
    assert await status_of(pair.stub().StreamGenerate(text_request("abc"))) is grpc.StatusCode.INTERNAL
    await pair.idle()
    assert ended(pair) == {"error": 1}
    pair.engine.rewrite_step = lambda step: [step]
    pair.engine.rejections = [rejection(engine_pb.REJECTION_REASON_DRAINING, "stopping") for _ in range(2)]
    assert await status_of(pair.stub().StreamGenerate(text_request("abc"))) is grpc.StatusCode.UNAVAILABLE
    await pair.idle()
    assert ended(pair) == {"error": 2}

    async def defect(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("frontend.generation.generation.tokenize", defect)
    assert await status_of(pair.stub().StreamGenerate(text_request("abc"))) is grpc.StatusCode.INTERNAL
    assert ended(pair) == {"error": 3}


async def test_lost_engine_and_stopped_frontend_count_as_errors_and_bill_the_tokens_sent(
    make_pair, text_request, ended, billed
):
    async def after_two_tokens(pair, end):
        pair.engine.pause()
        call = pair.stub().StreamGenerate(text_request("abcdef"))
        await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
        for _ in range(2):
            await pair.engine.step()
        await until(lambda: billed(pair) == (6, 2))
        status = asyncio.create_task(status_of(call))
        await end()
        assert await status is grpc.StatusCode.UNAVAILABLE
        assert ended(pair) == {"error": 1}
        assert billed(pair) == (6, 2)

    pair = await make_pair(failover_timeout_s=0)
    await after_two_tokens(pair, pair.engine.kill)
    pair = await make_pair()
    await after_two_tokens(pair, lambda: pair.app.drain(0.0))


async def test_invalid_requests_count_as_refused_by_reason(pair, ended, billed):
    specs = {
        "INVALID_REQUEST": pb.GenerationSpec(text="abc", sampling=pb.SamplingOptions(temperature=-1)),
        "MODEL_NOT_FOUND": pb.GenerationSpec(text="abc", model="other"),
        "REQUEST_TOO_LONG": pb.GenerationSpec(text="x" * 5000),
    }
    for spec in specs.values():
        assert await status_of(pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=spec))) in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
        )
    assert ended(pair) == dict.fromkeys(specs, 1)
    assert billed(pair) == (0, 0)


async def test_request_that_the_engine_finds_too_long_is_refused(pair, text_request, ended):
    pair.engine.rejections = [rejection(engine_pb.REJECTION_REASON_TOO_LONG, "9 blocks, 8 in all")]
    assert await status_of(pair.stub().StreamGenerate(text_request("abc"))) is grpc.StatusCode.INVALID_ARGUMENT
    assert ended(pair) == {"REQUEST_TOO_LONG": 1}


async def test_request_whose_second_answer_the_engine_refuses_is_an_error_once_it_is_billed(pair, ended, billed):
    """As when the adapter of a request is unloaded between its answers."""
    pair.engine.pause()
    spec = pb.GenerationSpec(text="abc", num_answers=2)
    call = pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=spec))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    pair.engine.rejections = [rejection(engine_pb.REJECTION_REASON_NO_ADAPTER, "unloaded")]
    pair.engine.resume()
    assert await status_of(call) is grpc.StatusCode.NOT_FOUND
    await pair.idle()
    assert ended(pair) == {"error": 1}
    assert billed(pair)[0] == 3


async def test_request_without_an_engine_is_refused(make_pair, text_request, ended):
    pair = await make_pair()
    pair.engine.set_state(engine_pb.ENGINE_STATE_DRAINING)
    await until(lambda: not pair.app.engines.serving)
    assert await status_of(pair.stub().StreamGenerate(text_request("abc"))) is grpc.StatusCode.UNAVAILABLE
    assert ended(pair) == {"ENGINE_UNAVAILABLE": 1}
    pair.engine.set_state(engine_pb.ENGINE_STATE_SERVING)
    await pair.app.wait_serving(HANG_S)


async def test_several_answers_are_one_request_that_is_billed_for_all_tokens(pair, ended, billed, scrape):
    spec = pb.GenerationSpec(text="abc", num_answers=3)
    messages = [message async for message in pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=spec))]
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    await pair.idle()
    assert len(answer.other_answers) == 2
    assert sum(message.chunk.num_tokens for message in messages) == 12
    assert ended(pair) == {"stop": 2}
    assert billed(pair) == (6, 24)
    metrics = pair.app.metrics
    assert scrape(metrics, "chairlift:request_params_n_sum") == 6
    assert scrape(metrics, "chairlift:request_max_num_generation_tokens_sum") == 8
    assert scrape(metrics, "chairlift:inter_token_latency_seconds_count") == 6 * 3
    assert scrape(metrics, "chairlift:request_queue_time_seconds_count") == 2
    assert scrape(metrics, "chairlift:time_to_first_token_seconds_count") == 2


async def test_many_clients_that_leave_at_random_are_all_counted(make_pair, text_request, ended, billed):
    pair = await make_pair(engine=FakeEngine(step_interval_s=0.001))
    stub = pair.stub()
    received = Counter()

    async def one(number):
        call = stub.StreamGenerate(text_request("x" * 60, max_tokens=100))
        num_tokens = 0  # of the last message, which the server may not count if the cancellation comes first
        for _ in range(number % 13 * 7):
            message = await call.read()
            received["tokens"] += num_tokens
            if message is grpc.aio.EOF:
                received["finished"] += 1
                return
            num_tokens = message.chunk.num_tokens
        call.cancel()

    await asyncio.gather(*(one(number) for number in range(65)))
    await pair.idle()
    ends = ended(pair)
    assert set(ends) <= {"stop", "cancelled"}
    assert ends["stop"] >= received["finished"] > 0
    prompt, output = billed(pair)
    assert output >= received["tokens"]
    assert prompt <= 60 * 65
