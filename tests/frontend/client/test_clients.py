"""Both clients against a real frontend."""

import gc

import grpc
import pytest

from chairlift import Client, GenerationError
from chairlift.v1 import generation_service_pb2 as pb

ENDLESS = {"ignore_end_token": True, "max_tokens": 4000}


async def test_generate_returns_the_whole_answer(client):
    answer = await client.generate("hello", seed=5, return_token_ids=True)
    assert answer.text == "hello"
    assert len(answer.token_ids) == answer.finished.usage.num_output_tokens == len("hello") + 1
    assert answer.effective_sampling.seed == 5
    assert answer.finished.reason == pb.FINISH_REASON_END_TOKEN


async def test_stream_yields_chunks_and_keeps_first_and_last_message(client):
    async with client.stream("hello wörld", stop_texts=["rl"]) as stream:
        assert stream.started is None
        texts = [chunk.text async for chunk in stream]
    assert "".join(texts) == "hello wö"
    assert (stream.started.model, stream.started.num_prompt_tokens) == ("fake", len("hello wörld".encode()))
    assert (stream.finished.reason, stream.finished.stop_text) == (pb.FINISH_REASON_STOP_TEXT, "rl")


async def test_stream_that_is_cut_within_a_character_ends_with_a_replacement(client):
    texts = [chunk.text async for chunk in client.stream("hello wörld", max_tokens=8)]
    assert "".join(texts) == "hello w\ufffd"


async def test_leaving_the_stream_cancels_the_generation(client, engine):
    engine.pause()
    async with client.stream("abc", **ENDLESS) as stream:
        await engine.wait_for(lambda: engine.num_open == 1)
        await engine.step()
        chunk = await anext(stream)
    assert chunk.text == "a"
    await engine.wait_for(lambda: len(engine.cancels) == 1)
    engine.resume()


async def test_a_stream_that_is_abandoned_cancels_the_generation(client, engine):
    async for chunk in client.stream("abc", **ENDLESS):
        assert chunk.text.startswith("a")
        break
    gc.collect()
    await engine.wait_for(lambda: len(engine.cancels) == 1)


async def test_chat_and_token_ids(client):
    assert (await client.generate(chat=[("user", "hi")])).text == "<user>hi<assistant>"
    counted = await client.count_tokens("hi", return_token_ids=True)
    assert (await client.generate(token_ids=counted.token_ids)).text == "hi"


async def test_count_tokens_and_get_model(client):
    assert (await client.count_tokens(chat=[("user", "hi")])).num_tokens == len("<user>hi<assistant>")
    model = await client.get_model()
    assert (model.model, model.max_model_len, model.vocab_size, model.has_chat_template) == ("fake", 4096, 258, True)


async def test_errors_name_status_reason_and_field(client):
    async def stream(*args, **options):
        return [chunk async for chunk in client.stream(*args, **options)]

    for call in (client.generate, stream):
        with pytest.raises(GenerationError) as raised:
            await call("hello", top_p=2.0)
        error = raised.value
        assert (error.status, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert [violation.field for violation in error.field_violations] == ["spec.sampling.top_p"]
    with pytest.raises(GenerationError):
        await client.count_tokens("x", model="another")


async def test_deadline_is_an_error(client, engine):
    engine.pause()
    with pytest.raises(GenerationError) as raised:
        await client.generate("hello", timeout_s=0.2)
    assert raised.value.status is grpc.StatusCode.DEADLINE_EXCEEDED


def test_no_server():
    with Client("127.0.0.1:1") as client, pytest.raises(GenerationError) as raised:
        client.get_model()
    assert raised.value.status is grpc.StatusCode.UNAVAILABLE
