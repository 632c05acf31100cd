"""The asyncio client against a real frontend."""

import grpc
import pytest

from chairlift import AsyncClient, GenerationError
from chairlift.v1 import generation_service_pb2 as pb


@pytest.fixture
async def client(target):
    async with AsyncClient(target) as client:
        yield client


async def test_generate_returns_the_whole_answer(client):
    answer = await client.generate("hello", temperature=0.0)
    assert answer.text == "hello"
    assert answer.finished.usage.num_output_tokens == len("hello") + 1


async def test_stream_yields_chunks_and_keeps_first_and_last_message(client):
    async with client.stream("hello wörld", stop_texts=["rl"]) as stream:
        texts = [chunk.text async for chunk in stream]
    assert "".join(texts) == "hello wö"
    assert stream.started.model == "fake"
    assert stream.finished.reason == pb.FINISH_REASON_STOP_TEXT
    assert stream.finished.stop_text == "rl"


async def test_leaving_the_stream_cancels_the_generation(client, engine):
    engine.pause()
    async with client.stream("abc", ignore_end_token=True, max_tokens=4000) as stream:
        await engine.wait_for(lambda: engine.num_open == 1)
        await engine.step()
        chunk = await anext(stream)
    assert chunk.text == "a"
    await engine.wait_for(lambda: len(engine.cancels) == 1)
    engine.resume()


async def test_count_tokens_and_get_model(client):
    assert (await client.count_tokens("hello")).num_tokens == 5
    assert (await client.get_model()).vocab_size == 258


async def test_errors_name_status_reason_and_field(client):
    with pytest.raises(GenerationError) as raised:
        await client.generate("hello", top_p=2.0)
    assert raised.value.status is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(GenerationError) as raised:
        async for _ in client.stream("hello", top_p=2.0):
            pass
    assert raised.value.reason == "INVALID_REQUEST"
    assert [violation.field for violation in raised.value.field_violations] == ["spec.sampling.top_p"]
    with pytest.raises(GenerationError):
        await client.count_tokens("x", model="another")
