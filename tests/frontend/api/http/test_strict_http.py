"""Ambiguous HTTP requests are refused, their connection is closed, and nothing is logged."""

import asyncio
import json
import logging

import pytest

from tests.hang import HANG_S

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "abc"}'
SMUGGLED = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"

AMBIGUOUS = {
    "both framings": (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "not both"),
    "both, swapped": (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n", 400, "not both"),
    "two lengths": (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", 400, "Content-Length"),
    "lengths in a list": (HEAD + b"content-length: 5, 6\r\n\r\n", 400, "Content-Length"),
    "a signed length": (HEAD + b"content-length: +5\r\n\r\n", 400, "Content-Length"),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", 400, "needs HTTP/1.1"),
    "another coding": (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n", 501, "Transfer-Encoding"),
    "two codings": (HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n", 501, "multiple"),
    "bare LF": (b"GET /version HTTP/1.1\nhost: x\n\n", 400, "CRLF"),
    "bare LF after the first line": (b"GET /version HTTP/1.1\nhost: x\r\n\r\n", 400, "CRLF"),
    "bare LF after a header": (b"GET /version HTTP/1.1\r\nhost: x\na: b\r\n\r\n", 400, "CRLF"),
    "bare LF at the end": (b"GET /version HTTP/1.1\r\nhost: x\r\n\n", 400, "CRLF"),
    "bare LF alone": (b"\n", 400, "CRLF"),
    "bare CR": (b"GET /version HTTP/1.1\r\nhost: x\r a: b\r\n\r\n", 400, "header line"),
    "CR CR LF": (b"GET /version HTTP/1.1\r\nhost: x\r\r\n\r\n", 400, "header line"),
    "a folded header": (b"GET /version HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n", 400, "folded"),
    "a folded header with a tab": (b"GET /version HTTP/1.1\r\nhost: x\r\na: b\r\n\tc\r\n\r\n", 400, "folded"),
    "a first header that is folded": (b"GET /version HTTP/1.1\r\n host: x\r\n\r\n", 400, "folded"),
    "a space before the colon": (b"GET /version HTTP/1.1\r\nhost : x\r\n\r\n", 400, "header line"),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", 400, "Host"),
    "two hosts": (b"GET /version HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, "Host"),
    "HTTP/0.9": (b"GET /version HTTP/0.9\r\nhost: x\r\n\r\n", 505, "HTTP/0.9"),
    "HTTP/1.2": (b"GET /version HTTP/1.2\r\nhost: x\r\n\r\n", 505, "HTTP/1.2"),
    "HTTP/2 with prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/2.0"),
    "no version": (b"GET /version\r\nhost: x\r\n\r\n", 400, "request line"),
    "HTTP/11": (b"GET /version HTTP/11\r\nhost: x\r\n\r\n", 400, "request line"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "request line"),
    "a chunk without a size": (CHUNKED + b"\r\n" + BODY + b"\r\n0\r\n\r\n", 400, "chunk header"),
    "a negative chunk": (CHUNKED + b"-5\r\n" + BODY + b"\r\n0\r\n\r\n", 400, "chunk header"),
    "a chunk longer than it says": (CHUNKED + b"5\r\n" + BODY + b"\r\n0\r\n\r\n", 400, "chunk"),
    "trailers that end in LF": (CHUNKED + b"11\r\n" + BODY + b"\r\n0\r\n\n", 400, "CRLF"),
    "trailers with LF": (CHUNKED + b"11\r\n" + BODY + b"\r\n0\r\na: b\n\n", 400, "CRLF"),
    "folded trailers": (CHUNKED + b"11\r\n" + BODY + b"\r\n0\r\na: b\r\n c\r\n\r\n", 400, "folded"),
}  # fmt: skip


async def exchange(port, data):
    """Sends bytes, returns all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(HANG_S):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(("data", "status", "reason"), AMBIGUOUS.values(), ids=AMBIGUOUS)
async def test_an_ambiguous_request_is_refused_and_its_connection_closed(shared_pair, caplog, data, status, reason):
    caplog.set_level(logging.INFO)
    answer = await exchange(shared_pair.app.http_port, data + SMUGGLED)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head.lower()
    assert reason in json.loads(body)["error"]["message"]
    await shared_pair.idle()
    assert [record.getMessage() for record in caplog.records if record.name != "asyncio"] == []


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["incomplete", "complete"])
async def test_a_head_of_more_than_64_kib_is_refused(shared_pair, end):
    head = b"GET /version HTTP/1.1\r\nhost: x\r\na: ".ljust((64 << 10) + 1 - len(end), b"b") + end
    answer = await exchange(shared_pair.app.http_port, head)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"content-length: 17\r\n\r\n" + BODY,
        (HEAD + b"content-length: 17\r\na: ").ljust((64 << 10) - 23, b"b") + b"\r\n\r\n" + BODY,
        (HEAD + b"content-length: 17\r\n\r\n" + BODY).replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD + b"content-length: 17\r\ncontent-length: 17\r\n\r\n" + BODY,
        CHUNKED + b"11\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"11;ext=1\r\n" + BODY + b"\r\n000\r\ntrailer: value\r\n\r\n",
        HEAD + b"Transfer-Encoding: CHUNKED\r\na:\r\n\r\n1\r\n{\r\n10\r\n" + BODY[1:] + b"\r\n0\r\n\r\n",
    ],
)
async def test_a_clear_request_is_answered(shared_pair, data):
    answer = await exchange(shared_pair.app.http_port, data.replace(b"host: x", b"host: x\r\nconnection: close"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"text":"abc"' in answer


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (b"http://a.example/version", b"200 OK"),
        (b"HTTPS://a.example:8000/version?x=http://b/", b"200 OK"),
        (b"http://a.example", b"404 Not Found"),
        (b"http://a.example?x=1", b"404 Not Found"),
        (b"http:///version", b"404 Not Found"),
        (b"/http://a.example/version", b"404 Not Found"),
    ],
)
async def test_a_target_may_be_a_whole_url(shared_pair, target, line):
    head = b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = await exchange(shared_pair.app.http_port, head)
    assert answer.startswith(b"HTTP/1.1 " + line)


async def test_the_host_of_a_whole_url_counts_instead_of_the_header(shared_pair):
    """Here it says whether a page is of another origin."""
    body = b"origin: http://a.example\r\nhost: x\r\nconnection: close\r\ncontent-length: 17\r\n\r\n" + BODY
    for host, status in ((b"a.example", b"200"), (b"b.example", b"415")):
        head = b"POST http://" + host + b"/v1/completions HTTP/1.1\r\n"
        answer = await exchange(shared_pair.app.http_port, head + body)
        assert answer.startswith(b"HTTP/1.1 " + status)
