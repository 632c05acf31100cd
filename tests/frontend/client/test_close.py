"""Calls of a closed client fail with its own error, also if they were running."""

import asyncio

import grpc
import pytest

from chairlift import AsyncClient, GenerationError

ENDLESS = {"ignore_end_token": True, "max_tokens": 4000}


async def read_all(stream):
    return [chunk async for chunk in stream]


CALLS = {
    "generate": lambda client: client.generate("abc", **ENDLESS),
    "stream": lambda client: read_all(client.stream("ghi", **ENDLESS)),
    "generate_many": lambda client: client.generate_many(["de", "f"], ENDLESS),
    "count_tokens": lambda client: client.count_tokens("abc"),
    "get_model": lambda client: client.get_model(),
}


@pytest.mark.parametrize("call", CALLS)
async def test_calls_of_a_closed_client_name_the_cause(client, call):
    await client.close()
    await client.close()
    with pytest.raises(GenerationError, match="client has been closed") as caught:
        await CALLS[call](client)
    assert (caught.value.status, caught.value.reason) == (grpc.StatusCode.CANCELLED, "CLIENT_CLOSED")


async def test_running_calls_end_when_their_client_is_closed(client, engine):
    engine.pause()
    calls = [asyncio.create_task(CALLS[name](client)) for name in ("generate", "stream", "generate_many")]
    await engine.wait_for(lambda: engine.num_open == 4)
    await client.close()
    for call in calls:
        with pytest.raises(GenerationError) as caught:
            await call
        assert (caught.value.status, caught.value.reason) == (grpc.StatusCode.CANCELLED, "CLIENT_CLOSED")
    engine.resume()


async def test_a_task_that_is_cancelled_stays_cancelled(target, engine):
    engine.pause()
    async with AsyncClient(target) as client:
        tasks = [
            asyncio.create_task(client.generate("abc", **ENDLESS)),
            asyncio.create_task(read_all(client.stream("de", **ENDLESS))),
        ]
        await engine.wait_for(lambda: engine.num_open == 2)
        for task in tasks:
            task.cancel()
        assert [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)] == [
            asyncio.CancelledError,
            asyncio.CancelledError,
        ]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.generate("abc", **ENDLESS)
    engine.resume()


async def test_a_stream_whose_read_was_cancelled_does_not_end_like_a_complete_one(target, engine):
    async with AsyncClient(target) as client:
        engine.pause()
        stream = client.stream("abc", **ENDLESS)
        read = asyncio.create_task(anext(stream))
        await engine.wait_for(lambda: engine.num_open == 1)
        read.cancel()
        await asyncio.wait([read])
        engine.resume()
        for _ in range(2):
            with pytest.raises(GenerationError, match="CANCELLED: the generation was cancelled"):
                await anext(stream)


async def test_cancelling_a_complete_stream_does_nothing(client):
    async with client.stream("abc") as stream:
        assert [chunk.text async for chunk in stream]
    assert await read_all(stream) == []
