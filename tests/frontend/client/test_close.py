"""After close() both clients raise their own error, whatever is asked of them, and whatever was under way."""

import asyncio

import grpc
import pytest

from chairlift import AsyncClient, Client, GenerationError

ENDLESS = {"ignore_end_token": True, "max_tokens": 4000}
SYNC_CALLS = {
    "generate": lambda client: client.generate("abc"),
    "stream": lambda client: list(client.stream("abc")),
    "generate_many": lambda client: client.generate_many(["abc", "de"]),
    "count_tokens": lambda client: client.count_tokens("abc"),
    "get_model": lambda client: client.get_model(),
}


def is_closed(error):
    return (error.status, error.reason) == (grpc.StatusCode.CANCELLED, "CLIENT_CLOSED")


@pytest.mark.parametrize("call", SYNC_CALLS)
def test_blocking_client_that_is_closed_says_so(call):
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(GenerationError, match="client has been closed") as caught:
        SYNC_CALLS[call](client)
    assert is_closed(caught.value)


async def read_all(stream):
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("call", SYNC_CALLS)
async def test_asyncio_client_that_is_closed_says_so(call):
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    await client.close()
    with pytest.raises(GenerationError, match="client has been closed") as caught:
        await (read_all(client.stream("abc")) if call == "stream" else SYNC_CALLS[call](client))
    assert is_closed(caught.value)


async def test_calls_of_a_blocking_client_end_when_it_is_closed(target, engine):
    engine.pause()
    client = Client(target)
    call = asyncio.create_task(asyncio.to_thread(client.generate, "abc", **ENDLESS))
    many = asyncio.create_task(asyncio.to_thread(client.generate_many, ["de", "f"], ENDLESS))
    stream = client.stream("ghi", **ENDLESS)
    await engine.wait_for(lambda: engine.num_open == 4)
    client.close()
    for each in (call, many, asyncio.to_thread(list, stream)):
        with pytest.raises(GenerationError) as caught:
            await each
        assert caught.value.status is grpc.StatusCode.CANCELLED
    engine.resume()


async def test_calls_of_an_asyncio_client_end_when_it_is_closed(target, engine):
    engine.pause()
    client = AsyncClient(target)
    call = asyncio.create_task(client.generate("abc", **ENDLESS))
    many = asyncio.create_task(client.generate_many(["de", "f"], ENDLESS))
    stream = asyncio.create_task(read_all(client.stream("ghi", **ENDLESS)))
    await engine.wait_for(lambda: engine.num_open == 4)
    await client.close()
    for each in (call, many, stream):
        with pytest.raises(GenerationError) as caught:
            await each
        assert caught.value.status is grpc.StatusCode.CANCELLED
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
