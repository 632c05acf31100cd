"""The blocking client against a real frontend. Its calls run in a thread: the server's event loop is this test's."""

import asyncio

import grpc
import pytest

from chairlift import Client, GenerationError
from chairlift.v1 import generation_service_pb2 as pb

ENDLESS = {"ignore_end_token": True, "max_tokens": 4000}


@pytest.fixture
async def client(target):
    with Client(target) as client:
        yield client


async def test_generate_returns_the_whole_answer(client):
    answer = await asyncio.to_thread(client.generate, "hello", seed=5, return_token_ids=True)
    assert answer.text == "hello"
    assert len(answer.token_ids) == len("hello") + 1
    assert answer.effective_sampling.seed == 5
    assert answer.finished.reason == pb.FINISH_REASON_END_TOKEN


async def test_stream_yields_chunks_and_keeps_first_and_last_message(client):
    def read():
        with client.stream("hello wörld", max_tokens=8) as stream:
            assert stream.started is None
            chunks = list(stream)
            return stream, chunks

    stream, chunks = await asyncio.to_thread(read)
    assert "".join(chunk.text for chunk in chunks) == "hello w\ufffd"
    assert stream.started.num_prompt_tokens == len("hello wörld".encode())
    assert stream.finished.reason == pb.FINISH_REASON_MAX_TOKENS


async def test_leaving_the_stream_cancels_the_generation(client, engine):
    engine.pause()
    stream = client.stream("abc", **ENDLESS)  # held until the end: a call that is garbage is cancelled by grpc
    await engine.wait_for(lambda: engine.num_open == 1)
    await engine.step()

    def read_one():
        with stream:
            return next(stream)

    chunk = await asyncio.to_thread(read_one)
    assert chunk.text == "a"
    await engine.wait_for(lambda: len(engine.cancels) == 1)
    engine.resume()


async def test_chat_and_token_ids(client):
    answer = await asyncio.to_thread(client.generate, chat=[("user", "hi")])
    assert answer.text == "<user>hi<assistant>"
    counted = await asyncio.to_thread(client.count_tokens, "hi", return_token_ids=True)
    answer = await asyncio.to_thread(client.generate, token_ids=counted.token_ids)
    assert answer.text == "hi"


async def test_count_tokens_and_get_model(client):
    counted = await asyncio.to_thread(client.count_tokens, chat=[("user", "hi")])
    assert counted.num_tokens == len("<user>hi<assistant>")
    model = await asyncio.to_thread(client.get_model)
    assert (model.model, model.max_model_len, model.has_chat_template) == ("fake", 4096, True)


async def test_errors_name_status_reason_and_field(client):
    for call in (client.generate, lambda *args, **kwargs: list(client.stream(*args, **kwargs))):
        with pytest.raises(GenerationError) as raised:
            await asyncio.to_thread(call, "hello", temperature=-1.0)
        error = raised.value
        assert error.status is grpc.StatusCode.INVALID_ARGUMENT
        assert error.reason == "INVALID_REQUEST"
        assert [violation.field for violation in error.field_violations] == ["spec.sampling.temperature"]


async def test_deadline_is_an_error(client, engine):
    engine.pause()
    with pytest.raises(GenerationError) as raised:
        await asyncio.to_thread(client.generate, "hello", timeout_s=0.2)
    assert raised.value.status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_nobody_there():
    with Client("127.0.0.1:1") as client, pytest.raises(GenerationError) as raised:
        await asyncio.to_thread(client.get_model)
    assert raised.value.status is grpc.StatusCode.UNAVAILABLE
