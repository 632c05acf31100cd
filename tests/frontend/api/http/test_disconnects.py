"""Clients that leave, stall or stay while the server stops."""

import asyncio
import contextlib
import json
import logging
import signal
import socket

import h11
import openai
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from frontend.api.http import connection as http_connection
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from tests.hang import HANG_S
from tests.support.frontend.open_request import open_request


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "de", "f"]], ids=["one prompt", "three prompts"])
async def test_client_that_leaves_before_the_first_token_is_cancelled_in_the_engine(http_pair, stream, prompt):
    engine = http_pair.engine
    engine.pause()
    _, writer = await open_request(http_pair, prompt=prompt, stream=stream)
    count = 1 if prompt == "abc" else 3
    await engine.wait_for(lambda: engine.num_open == count)
    writer.close()
    await engine.wait_for(lambda: len(engine.cancels) == count)
    assert {reason for _, reason in engine.cancels} == {engine_pb.CANCEL_REASON_CLIENT}


async def test_a_half_close_cancels_like_a_close(http_pair):
    """TCP shows the same for both, and clients that give up close."""
    engine = http_pair.engine
    engine.pause()
    reader, writer = await open_request(http_pair, prompt="abc")
    await engine.wait_for(lambda: engine.num_open == 1)
    writer.write_eof()
    await engine.wait_for(lambda: len(engine.cancels) == 1)
    assert await reader.read() == b""
    writer.close()


CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4000}
STREAMS = {
    "/v1/completions": ({"prompt": "abc", "max_tokens": 4000}, b'"text":"a"'),
    "/v1/chat/completions": (CHAT, b'"content":"<"'),
    "/v1/responses": ({"input": "abc", "max_output_tokens": 4000}, b'"delta":"<"'),
    "/v1/messages": (CHAT, b'"text":"<"'),
}


@pytest.mark.parametrize("path", STREAMS)
async def test_client_that_leaves_inside_a_stream_is_cancelled_in_the_engine(http_pair, path):
    body, first_text = STREAMS[path]
    engine = http_pair.engine
    engine.pause()
    reader, writer = await open_request(http_pair, path, **body, stream=True, ignore_eos=True)
    await engine.wait_for(lambda: engine.num_open == 1)
    await engine.step()
    received = b""
    while first_text not in received:
        received += await reader.read(1 << 10)
    writer.close()
    await engine.wait_for(lambda: len(engine.cancels) == 1)


@pytest.mark.parametrize(
    ("kind", "at_once", "status"),
    [(b"application/json", True, b"400"), (b"text/plain", True, b"400"), (b"text/plain", False, b"415")],
)
async def test_body_that_is_not_valid_http_is_refused_once_and_logs_no_error(http_pair, kind, at_once, status, caplog):
    reader, writer = await asyncio.open_connection("127.0.0.1", http_pair.app.http_port)
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % kind
    writer.write(head + b"no chunk\r\n" if at_once else head)
    assert status in await reader.readline()
    if not at_once:
        writer.write(b"no chunk\r\n")
    assert b"HTTP/1.1" not in await reader.read()
    writer.close()
    await http_pair.idle()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_client_that_leaves_inside_its_body_leaves_nothing_behind(http_pair):
    _, writer = await asyncio.open_connection("127.0.0.1", http_pair.app.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    await writer.drain()
    writer.close()
    await http_pair.idle()


async def test_one_connection_serves_request_after_request(http_pair):
    reader, writer = await asyncio.open_connection("127.0.0.1", http_pair.app.http_port)
    for number in range(5):
        body = json.dumps({"prompt": str(number), "stream": number % 2 == 1}).encode()
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        assert b" 200 " in await reader.readline()
        assert b"date: " in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b'"text":"%d"' % number)
        await reader.readuntil(b"\r\n0\r\n\r\n" if number % 2 else b"}}}")
    writer.close()


@pytest.mark.parametrize("sent_before", [b"", b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["first", "second"])
async def test_head_that_does_not_end_closes_the_connection(http_pair, monkeypatch, sent_before):
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 20.0 if sent_before else 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", http_pair.app.http_port)
    if sent_before:
        writer.write(sent_before)
        await reader.readuntil(b"}")
        monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.2)
    writer.write(b"GET /version HTTP/1.1\r\n")
    async with asyncio.timeout(HANG_S):
        while not reader.at_eof():  # bytes keep coming, the head does not end
            writer.write(b"x: y\r\n")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.02)
    writer.close()


async def test_silent_connection_is_closed(http_pair, monkeypatch):
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", http_pair.app.http_port)
    async with asyncio.timeout(HANG_S):
        assert await reader.read() == b""
    writer.close()


async def test_connection_is_kept_after_the_rest_of_a_refused_request(skip, http_pair, monkeypatch):
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 600.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", http_pair.app.http_port)
    (connection,) = http_pair.app._http._connections()
    monkeypatch.setattr(connection, "timeout_keep_alive", 6000.0)
    writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
    assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(b"{")
    while not connection._head_timer:
        await asyncio.sleep(0)
    writer.write(b"}")
    while connection.conn.their_state is not h11.IDLE:
        await asyncio.sleep(0)
    skip(3000.0)
    for _ in range(3):  # a timer that is due runs
        await asyncio.sleep(0)
    assert not connection.transport.is_closing()
    skip(4000.0)
    await reader.read()  # until the connection is closed
    writer.close()


async def test_long_answer_outlives_the_clock_of_its_head(skip, http_pair, client, monkeypatch):
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 5.0)
    http_pair.engine.pause()
    call = asyncio.ensure_future(client.completions.create(model="fake", prompt="abc"))
    await http_pair.engine.wait_for(lambda: http_pair.engine.num_open == 1)
    skip(6.0)
    http_pair.engine.resume()
    assert (await call).choices[0].text == "abc"


async def test_reader_that_stalls_is_cut_off(make_pair, caplog):
    pair = await make_pair(http=True, stall_timeout_s=0.3)
    pair.engine.tokens_per_step = 64
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", pair.app.http_port))
    body = {"messages": [{"role": "user", "content": "abc"}], "stream": True, "max_tokens": 4000, "ignore_eos": True}
    data = json.dumps({**body, "n": 8, "logprobs": True, "top_logprobs": 20}).encode()  # some 30 MB of answers
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.send(head.encode() + data)
    await pair.engine.wait_for(lambda: pair.engine.cancels)
    assert pair.engine.cancels[0][1] == engine_pb.CANCEL_REASON_STALLED
    await pair.idle()
    sock.close()
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.WARNING] == []


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_reader_of_named_events_that_stalls_is_cut_off(make_pair, path):
    pair = await make_pair(http=True, stall_timeout_s=0.3, coalesce=False)  # an event per token: 400 KB
    pair.engine.tokens_per_step = 64
    pair.app._http._listener._listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    _, writer = await open_request(pair, path, receive_buffer=4096, **STREAMS[path][0], stream=True, ignore_eos=True)
    await pair.engine.wait_for(lambda: pair.engine.cancels)
    assert pair.engine.cancels[0][1] == engine_pb.CANCEL_REASON_STALLED
    await pair.idle()
    writer.close()


async def test_drain_lets_running_calls_finish_and_takes_nothing_new(http_pair, client):
    engine = http_pair.engine
    engine.pause()
    whole = asyncio.ensure_future(client.completions.create(model="fake", prompt="abc"))
    stream = asyncio.ensure_future(client.completions.create(model="fake", prompt="abc", stream=True))
    await engine.wait_for(lambda: engine.num_open == 2)
    drain = asyncio.create_task(http_pair.app.drain(HANG_S))
    await asyncio.sleep(0)
    for streamed in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="fake", prompt="abc", stream=streamed)
        assert (caught.value.status_code, caught.value.code) == (503, "server_draining")
    engine.resume()
    assert (await whole).choices[0].text == "abc"
    assert "".join([event.choices[0].text async for event in await stream]) == "abc"
    assert await drain == 2


async def test_drain_waits_until_the_client_has_taken_its_answer(make_pair):
    pair = await make_pair(http=True)
    pair.engine.tokens_per_step = 64
    pair.app._http._listener._listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of connections too
    reader, writer = await open_request(pair, receive_buffer=4096, prompt="x" * 2000, max_tokens=2000, logprobs=5)
    async with asyncio.timeout(HANG_S):
        await reader.readuntil(b"\r\n")
        await pair.app.calls.wait_idle()
        drain = asyncio.create_task(pair.app.drain(HANG_S))
        await asyncio.wait([drain], timeout=0.3)
        assert not drain.done()
        rest = asyncio.create_task(reader.read())
        await drain
        await pair.app.stop()
        _, body = (await rest).split(b"\r\n\r\n")
    assert json.loads(body)["choices"][0]["text"] == "x" * 2000
    writer.close()


async def test_call_that_outlasts_the_drain_ends_with_503(http_pair, client):
    engine = http_pair.engine
    engine.pause()
    call = asyncio.ensure_future(client.completions.create(model="fake", prompt="abc"))
    await engine.wait_for(lambda: engine.num_open == 1)
    assert await http_pair.app.drain(0.05) == 0
    with pytest.raises(openai.InternalServerError, match="stopped"):
        await call


async def test_stop_closes_the_port_and_idle_connections(http_pair, client):
    await client.completions.create(model="fake", prompt="abc")  # its connection stays open
    await http_pair.app.stop()
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection("127.0.0.1", http_pair.app.http_port)


async def test_stop_closes_connections_whose_request_is_incomplete(http_pair, caplog):
    reader, writer = await asyncio.open_connection("127.0.0.1", http_pair.app.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 99\r\n\r\n")
    assert b" 100 " in await reader.readline()
    writer.write(b"{")
    await http_pair.app.stop()
    assert b"HTTP/1.1" not in await reader.read()
    writer.close()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_signal_handlers_of_the_process_stay_as_they_were(make_pair, connect):
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    await connect(await make_pair(http=True)).completions.create(model="fake", prompt="abc")
    assert [signal.getsignal(number) for number in numbers] == before


async def test_port_in_use_is_a_config_error(http_pair):
    app = FrontendApp(FrontendConfig(port=0, http_port=http_pair.app.http_port))
    with pytest.raises(ConfigError, match=r"cannot listen on .*Address already in use; .*--http-port.*--no-http"):
        await app.start()
    await app.stop()


async def test_http_host_can_differ_from_the_grpc_host(make_pair):
    pair = await make_pair(http=True, http_host="127.0.0.2")
    _, writer = await asyncio.open_connection("127.0.0.2", pair.app.http_port)
    writer.close()
