"""Requests over HTTP are counted and billed like those over gRPC."""

import asyncio
import json
import threading

import pytest
from prometheus_client.registry import Collector

from tests.hang import HANG_S


async def post(pair, **body):
    """Sends a completion request on its own connection; returns the connection's reader and writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.http_port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


@pytest.fixture
async def pair(make_pair):
    return await make_pair(http=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_prompt_of_a_body_counts_as_a_request(pair, ended, billed, stream):
    reader, writer = await post(pair, prompt=["abc", "de"], stream=stream, max_tokens=20)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    writer.close()
    await pair.idle()
    assert ended(pair) == {"stop": 2}
    assert billed(pair) == (5, 7)


@pytest.mark.parametrize(("stream", "bill"), [(True, (6, 3)), (False, (0, 0))])
async def test_client_that_leaves_is_billed_for_the_tokens_sent(pair, scrape, ended, billed, stream, bill):
    pair.engine.pause()
    reader, writer = await post(pair, prompt="abcdef", stream=stream, max_tokens=20)
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    for letter in b"abc":
        await pair.engine.step()
        if stream:
            await reader.readuntil(b'"text":"%c"' % letter)
    async with asyncio.timeout(HANG_S):
        while billed(pair) != bill or not scrape(pair.app.metrics, "chairlift:time_to_first_token_seconds_count"):
            await asyncio.sleep(0)
    writer.close()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 1)
    pair.engine.resume()
    await pair.idle()
    assert ended(pair) == {"cancelled": 1}
    assert billed(pair) == bill


async def test_prompts_of_a_body_that_find_no_place_are_shed_and_those_that_never_fit_refused(make_pair, ended):
    pair = await make_pair(http=True, max_queued_requests=3)
    pair.engine.pause()
    waiting, waiting_writer = await post(pair, prompt="abc")
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    for prompt, status in ((["a", "b", "c"], b"429"), (["a", "b", "c", "d"], b"400")):
        reader, writer = await post(pair, prompt=prompt)
        assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
        writer.close()
    assert ended(pair) == {"shed": 3, "INVALID_REQUEST": 4}
    pair.engine.resume()
    assert (await waiting.read()).startswith(b"HTTP/1.1 200")
    waiting_writer.close()
    await pair.idle()
    assert ended(pair) == {"shed": 3, "INVALID_REQUEST": 4, "stop": 1}


async def test_prompt_that_is_too_long_is_refused(pair, ended):
    reader, writer = await post(pair, prompt="x" * 5000)
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    assert ended(pair) == {"REQUEST_TOO_LONG": 1}


async def test_streams_go_on_while_the_metrics_are_rendered(pair):
    """With many engines and adapters that takes hundreds of milliseconds."""
    is_rendering, may_end = threading.Event(), threading.Event()
    went_on = []

    class Slow(Collector):
        def collect(self):
            is_rendering.set()
            went_on.append(may_end.wait(timeout=5))
            return []

    pair.app.metrics._exported.register(Slow())
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.http_port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    await asyncio.to_thread(is_rendering.wait)
    answer, answer_writer = await post(pair, prompt="abc", stream=True, max_tokens=20)
    assert (await answer.read()).startswith(b"HTTP/1.1 200")
    may_end.set()
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    assert went_on == [True]
    for one in (writer, answer_writer):
        one.close()


async def test_metrics_endpoint_returns_the_rendered_metrics(pair):
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.http_port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"content-type: text/plain; version=0.0.4; charset=utf-8" in head.lower()
    names = [line for line in body.splitlines() if line.startswith(b"# TYPE")]
    assert names == [line for line in pair.app.metrics.render().splitlines() if line.startswith(b"# TYPE")]
