"""A stream that has nothing to say sends comments, which clients ignore, so that proxies do not close it."""

import asyncio

import pytest

from frontend.api.http import event_stream
from tests.support.frontend.open_request import open_request

COMMENT = b": keep-alive\n\n"
MESSAGES = {"messages": [{"role": "user", "content": "abc"}]}
STREAMS = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 40},
    "/v1/chat/completions": {**MESSAGES, "max_tokens": 40},
    "/v1/responses": {"input": "abc", "max_output_tokens": 40},
    "/v1/messages": {**MESSAGES, "max_tokens": 40},
}


@pytest.fixture(autouse=True)
def short_silences(monkeypatch):
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.01)


@pytest.mark.parametrize("path", STREAMS)
async def test_comments_stand_between_events_in_a_silence(http_pair, path):
    engine = http_pair.engine
    engine.pause()
    reader, writer = await open_request(http_pair, path, **STREAMS[path], stream=True)
    await engine.wait_for(lambda: engine.num_open == 1)
    await engine.step()
    received = b""
    while received.count(COMMENT) < 2:
        received += await reader.read(1 << 10)
    engine.resume()
    while not received.endswith(b"0\r\n\r\n"):
        received += await reader.read(1 << 16)
    writer.close()
    _, _, head_and_events = received.partition(b"\r\n\r\n")
    chunks = head_and_events.split(b"\r\n")[1::2]
    assert b"data: " in chunks[0]
    assert COMMENT in chunks
    assert all(chunk.endswith(b"\n\n") for chunk in chunks if chunk)


async def test_nothing_comes_before_the_first_token(http_pair):
    engine = http_pair.engine
    engine.pause()
    reader, writer = await open_request(http_pair, **STREAMS["/v1/completions"], stream=True)
    await engine.wait_for(lambda: engine.num_open == 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)  # ten silences
    writer.close()


async def test_a_client_library_skips_comments(http_pair, client):
    engine = http_pair.engine
    engine.pause()
    reading = asyncio.create_task(client.completions.create(model="fake", **STREAMS["/v1/completions"], stream=True))
    await engine.wait_for(lambda: engine.num_open == 1)
    await engine.step()
    texts = []
    async for event in await reading:
        if not texts:
            await asyncio.sleep(0.05)  # five silences
            engine.resume()
        texts.append(event.choices[0].text)
    assert "".join(texts) == "abc"
