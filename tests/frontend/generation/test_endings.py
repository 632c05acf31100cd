"""Requests that are cancelled, late, stalled or refused leave nothing behind."""

import asyncio
import resource

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.calls import failure
from tests.support.frontend.fake_engine import FakeEngine


def details_of(error):
    metadata = dict(error.trailing_metadata())
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status_pb2.Status.FromString(metadata["grpc-status-details-bin"]).details:
        detail.Unpack(info)
        detail.Unpack(retry)
    return info.reason, retry.retry_delay.ToTimedelta().total_seconds(), metadata.get("grpc-retry-pushback-ms")


async def test_client_that_leaves_while_queued_cancels_in_the_engine(pair, text_request):
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abc"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    assert pair.app.admission.num_requests == 1
    call.cancel()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 1)
    assert pair.engine.cancels == [(1, engine_pb.CANCEL_REASON_CLIENT)]
    assert pair.session.num_open == 1  # the handle is in use until the engine has confirmed
    pair.engine.resume()
    await pair.idle()


async def test_channel_that_closes_cancels_everything_on_it(pair, text_request):
    pair.engine.pause()
    channel = pair.channel()
    path = "/chairlift.v1.GenerationService/StreamGenerate"
    method = channel.unary_stream(path, request_serializer=pb.StreamGenerateRequest.SerializeToString)
    calls = [method(text_request("abc")) for _ in range(20)]
    await pair.engine.wait_for(lambda: pair.engine.num_open == 20)
    await channel.close()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 20)
    pair.engine.resume()
    await pair.idle()
    assert all(call.done() for call in calls)


async def test_deadline_travels_to_the_engine_and_ends_the_request(pair, text_request):
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abc"), timeout=5.0)  # longer than a busy machine stalls
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    assert 0 < pair.engine.submissions[0].remaining_ms <= 5050  # gRPC rounds it
    error = await failure(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 1)
    assert pair.engine.cancels == [(1, engine_pb.CANCEL_REASON_DEADLINE)]
    pair.engine.resume()


async def test_without_a_deadline_and_a_default_none_is_sent(make_pair, text_request):
    pair = await make_pair(default_timeout_s=0)
    await pair.stub().Generate(pb.GenerateRequest(spec=text_request("abc").spec))
    assert not pair.engine.submissions[0].HasField("remaining_ms")


async def test_full_queue_of_requests_is_refused_with_a_retry_delay(make_pair, text_request):
    pair = await make_pair(max_queued_requests=2)
    pair.engine.pause()
    stub = pair.stub()
    calls = [stub.StreamGenerate(text_request("abc")) for _ in range(2)]
    await pair.engine.wait_for(lambda: pair.engine.num_open == 2)
    error = await failure(stub.StreamGenerate(text_request("abc")))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    reason, retry_s, pushback = details_of(error)
    assert (reason, pushback) == ("QUEUE_FULL", str(int(retry_s * 1000)))
    assert retry_s > 0
    assert "at most 2" in error.details()
    await pair.engine.step()  # both get their first token and wait no more
    for call in calls:
        assert (await call.read()).HasField("started")
    extra = stub.StreamGenerate(text_request("abc"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 3)
    pair.engine.resume()
    for call in (*calls, extra):
        while (await call.read()) is not grpc.aio.EOF:
            pass


async def test_queue_full_of_tokens_is_refused_before_tokenizing(make_pair, text_request, monkeypatch):
    pair = await make_pair(max_queued_tokens=1000)
    pair.engine.pause()
    stub = pair.stub()
    call = stub.StreamGenerate(text_request("x" * 900))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    assert pair.app.admission.num_tokens == 900

    async def not_now(*args, **options):
        raise AssertionError("tokenized")

    monkeypatch.setattr("frontend.generation.generation.tokenize", not_now)
    error = await failure(stub.StreamGenerate(text_request("x" * 800)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "900 prompt tokens wait" in error.details()
    call.cancel()
    pair.engine.resume()
    await pair.idle()


async def test_low_estimate_is_corrected_after_tokenizing(make_pair, text_request):
    pair = await make_pair(max_queued_tokens=1000)
    pair.engine.pause()
    stub = pair.stub()
    call = stub.StreamGenerate(text_request("x" * 900))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    error = await failure(stub.StreamGenerate(text_request("x" * 200)))  # guessed 50 tokens, one byte is one token here
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(pair.engine.submissions) == 1
    call.cancel()
    pair.engine.resume()
    await pair.idle()


async def test_prompt_larger_than_the_queue_is_no_retryable_refusal(make_pair, text_request):
    pair = await make_pair(max_queued_tokens=10)
    with pytest.raises(grpc.aio.AioRpcError, match="the prompt has 11 tokens, and in all at most 10") as caught:
        await pair.stub().Generate(pb.GenerateRequest(spec=text_request("x" * 11).spec))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=text_request("x" * 10).spec))
    assert answer.text == "x" * 10


NARROW = ("grpc.http2.bdp_probe", 0)  # the client's window stays at 64 KiB; by default it grows to megabytes
ENDLESS = {"max_tokens": 150_000, "ignore_end_token": True}


async def parked(pair):
    """Waits until the engine gets no more credit: it has none, and the same number of steps twice, a while apart."""
    seen = -1
    while seen != pair.engine.num_steps or not pair.engine.all_parked:
        seen = pair.engine.num_steps
        await asyncio.sleep(0.3)


async def test_reader_that_stops_is_parked_and_neighbours_go_on(make_pair, text_request):
    engine = FakeEngine(max_model_len=200_000, tokens_per_step=64)
    pair = await make_pair(engine=engine, stall_timeout_s=30.0)
    slow = [pair.stub(NARROW).StreamGenerate(text_request("x" * 400, **ENDLESS)) for _ in range(2)]
    for call in slow:
        assert (await call.read()).HasField("started")
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await parked(pair)
    assert engine.num_open == 2
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=text_request("y" * 2000, max_tokens=3000).spec))
    assert answer.text == "y" * 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 8 * 1024
    num_steps = engine.num_steps
    while engine.num_steps < num_steps + 10:  # reading again makes it go on, nothing lost
        assert (await slow[0].read()).HasField("chunk")
    for call in slow:
        call.cancel()
    await pair.idle()


async def test_stalled_reader_is_cut_off(make_pair, text_request):
    engine = FakeEngine(max_model_len=200_000, tokens_per_step=64)
    pair = await make_pair(engine=engine, stall_timeout_s=0.3)
    channel = pair.channel(NARROW)
    method = channel.unary_stream(
        "/chairlift.v1.GenerationService/StreamGenerate",
        request_serializer=pb.StreamGenerateRequest.SerializeToString,
        response_deserializer=pb.StreamGenerateResponse.FromString,
    )
    calls = [method(text_request("x" * 400, **ENDLESS)) for _ in range(2)]
    for call in calls:
        assert (await call.read()).HasField("started")
    await engine.wait_for(lambda: len(engine.cancels) == 2)
    assert {reason for _, reason in engine.cancels} == {engine_pb.CANCEL_REASON_STALLED}
    await pair.idle()
    num_tokens = 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 - what was under way arrives, then the status
        while True:
            chunk = (await calls[0].read()).chunk
            assert chunk.first_token_index == num_tokens
            num_tokens += chunk.num_tokens
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert details_of(caught.value)[0] == "CLIENT_STALLED"
    await channel.close()  # the other one never learns of it


async def test_unary_answer_needs_no_reader(make_pair, text_request):
    pair = await make_pair(token_window=8)
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=text_request("z" * 500, max_tokens=600).spec))
    assert answer.text == "z" * 500


@pytest.mark.parametrize("window", [1, 2, 7])
async def test_small_windows_lose_nothing(make_pair, text_request, window):
    pair = await make_pair(token_window=window)
    call = pair.stub().StreamGenerate(text_request("abcdefghij" * 10))
    assert "".join([message.chunk.text async for message in call]) == "abcdefghij" * 10
    assert pair.engine.submissions[0].token_credit == window


async def test_engine_lost_while_tokenizing(make_pair, text_request, monkeypatch):
    pair = await make_pair(failover_timeout_s=0)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*args, **options):
        entered.set()
        await go_on.wait()
        return [1, 2, 3]

    monkeypatch.setattr("frontend.generation.generation.tokenize", slow)
    call = asyncio.create_task(failure(pair.stub().StreamGenerate(text_request("abc"))))
    await entered.wait()
    await pair.engine.kill()
    while pair.app.engines.serving:
        await asyncio.sleep(0)
    go_on.set()
    assert (await call).code() is grpc.StatusCode.UNAVAILABLE
    assert pair.app.admission.num_requests == 0
