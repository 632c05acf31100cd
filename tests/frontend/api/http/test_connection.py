"""How an answer travels: without Nagle's delay, and its head in one write with the first of its body.

Writes and socket options are looked at, never the clock: on a kept-alive connection Nagle's algorithm holds a second
small packet until the client acknowledges the first, which Linux delays by 40 ms.
"""

import asyncio
import json
import socket

import pytest

from frontend.api.http.connection import HttpConnection


class RecordingTransport:
    """A transport that remembers what was written, one entry for each write."""

    def __init__(self, transport):
        self._transport = transport
        self.writes = []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def write(self, data):
        if data:  # an empty write is no system call
            self.writes.append(bytes(data))
        self._transport.write(data)


@pytest.fixture
def transports(monkeypatch):
    """Of the connections from now on, in their order."""
    made, connection_made = [], HttpConnection.connection_made

    def record(connection, transport):
        made.append(RecordingTransport(transport))
        connection_made(connection, made[-1])

    monkeypatch.setattr(HttpConnection, "connection_made", record)
    return made


async def exchange(reader, writer, method, path, body=None):
    """One request on a kept-alive connection; returns the answer's bytes, head and body."""
    data = json.dumps(body).encode() if body is not None else b""
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    head = await reader.readuntil(b"\r\n\r\n")
    if method == "HEAD":
        return head
    if b"chunked" in head:
        return head + await reader.readuntil(b"\r\n0\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return head + await reader.readexactly(int(length.partition(b":")[2]))


async def test_connections_send_small_packets_at_once(shared_pair, transports):
    for number in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", shared_pair.app.http_port)
        await exchange(reader, writer, "GET", "/version")
        accepted = transports[number].get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        writer.close()


async def test_whole_answers_on_a_kept_alive_connection_are_one_write_each(shared_pair, transports):
    reader, writer = await asyncio.open_connection("127.0.0.1", shared_pair.app.http_port)
    answers = [
        await exchange(reader, writer, *request)
        for request in [
            ("POST", "/v1/completions", {"prompt": "abc"}),
            ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
            ("POST", "/v1/completions", {"prompt": 7.5}),
            ("GET", "/v1/models"),
            ("GET", "/health"),
            ("HEAD", "/health"),
            ("GET", "/nowhere"),
            ("POST", "/v1/completions", {"prompt": "abc"}),
        ]
    ]
    writer.close()
    assert len(transports) == 1
    assert transports[0].writes == answers
    assert [answer.split(b" ", 2)[1] for answer in answers] == [
        *(b"200", b"200", b"400", b"200", b"200", b"200", b"404", b"200")
    ]


async def test_a_streams_head_comes_with_its_first_event_and_each_later_event_is_one_write(shared_pair, transports):
    reader, writer = await asyncio.open_connection("127.0.0.1", shared_pair.app.http_port)
    for _ in range(2):  # the second on a connection whose client has acknowledged things before
        for transport in transports:
            transport.writes.clear()
        answer = await exchange(reader, writer, "POST", "/v1/completions", {"prompt": "abc", "stream": True})
        first, *events, done, end = transports[0].writes
        assert first.startswith(b"HTTP/1.1 200 ")
        assert b"data: {" in first
        for event in events:
            assert event.count(b"\r\n") == 2  # a chunk with its size
            assert b"data: {" in event
        assert b"data: [DONE]\n\n" in done
        assert end == b"0\r\n\r\n"
        assert b"".join(transports[0].writes) == answer
    writer.close()


async def test_a_refusal_of_malformed_bytes_is_one_write(shared_pair, transports):
    reader, writer = await asyncio.open_connection("127.0.0.1", shared_pair.app.http_port)
    writer.write(b"this is no HTTP\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert transports[0].writes == [answer]
