"""The frontend of `pair`, and the fake engine behind it, which answers every prompt with the prompt."""

import asyncio

import pytest

from chairlift import AsyncClient, Client


@pytest.fixture
def engine(pair):
    return pair.engine


@pytest.fixture
def target(pair):
    return f"127.0.0.1:{pair.app.port}"


class Awaitable:
    """The blocking client with the asyncio client's methods: calls run in a thread beside the server's event loop."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            return await asyncio.to_thread(getattr(self._client, name), *args, **kwargs)

        return call

    def stream(self, *args, **kwargs):
        return AwaitableStream(self._client.stream(*args, **kwargs))


class AwaitableStream:
    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __aiter__(self):
        return self

    async def __anext__(self):
        chunk = await asyncio.to_thread(next, self._stream, None)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self):
        self._stream.__enter__()
        return self

    async def __aexit__(self, *error):
        self._stream.__exit__(*error)


@pytest.fixture(params=["blocking", "asyncio"])
async def client(request, target):
    """Either client, to be awaited."""
    if request.param == "blocking":
        with Client(target) as client:
            yield Awaitable(client)
    else:
        async with AsyncClient(target) as client:
            yield client
