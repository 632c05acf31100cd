"""A full queue refuses generation requests on arrival, before they are read."""

import asyncio
import json

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.grpc import error_interceptor as interceptor
from frontend.api.http import call_runner as runner
from tests.hang import HANG_S

REQUEST = pb.GenerateRequest(spec=pb.GenerationSpec(text="x"))


@pytest.fixture
async def full_pair(make_pair):
    """A pair whose queue has a limit of one request, which is waiting."""
    pair = await make_pair(http=True, max_queued_requests=1)
    pair.engine.pause()
    waiting = asyncio.ensure_future(pair.stub().Generate(REQUEST))
    await pair.engine.wait_for(lambda: len(pair.engine.submissions) == 1)
    yield pair
    pair.engine.resume()
    assert (await waiting).text == "x"


async def http_answer(pair, head):
    """Returns the head of a request, whose body is never sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.http_port)
    writer.write(head)
    async with asyncio.timeout(HANG_S):
        status = int((await reader.readline()).split()[1])
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
    writer.close()
    await writer.wait_closed()
    return status, headers, body


def head(path, *lines):
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: a", "content-length: 100000", *lines, "", ""]).encode()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_http_request_is_refused_before_its_body_is_read(full_pair, path):
    status, headers, _ = await http_answer(full_pair, head(path, "content-type: application/json"))
    assert status in (429, 529)
    assert "retry-after" in headers


async def test_grpc_request_is_refused_before_it_is_parsed(full_pair, monkeypatch, scrape):
    def parsed(*args):
        raise AssertionError("parsed")

    monkeypatch.setattr(interceptor, "_parsed", parsed)
    received = scrape(full_pair.app.metrics, "chairlift:requests_received_total")
    calls = [full_pair.stub().Generate(REQUEST) for _ in range(20)]
    for call in calls:
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests wait for their first token, at most 1 may" in await call.details()
    assert len(full_pair.engine.submissions) == 1
    assert scrape(full_pair.app.metrics, "chairlift:requests_received_total") == received + 20
    assert scrape(full_pair.app.metrics, "chairlift:request_success_total", "finished_reason")["shed"] == 20


async def test_refusal_has_a_retry_delay_and_a_reason(full_pair):
    calls = [full_pair.stub().Generate(REQUEST) for _ in range(3)]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        details = dict(caught.value.trailing_metadata())
        assert int(details["grpc-retry-pushback-ms"]) > 0
        status = rpc_status.from_call(_Finished(caught.value))
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.reason == "QUEUE_FULL"


class _Finished:
    def __init__(self, error):
        self.code, self.details, self.trailing_metadata = error.code, error.details, error.trailing_metadata


async def test_other_methods_are_served(full_pair):
    assert (await full_pair.stub().GetModel(pb.GetModelRequest())).model == "fake"


async def test_calls_without_a_key_are_unauthenticated_even_if_the_queue_is_full(make_pair):
    pair = await make_pair(http=True, max_queued_requests=1, api_key=("secret",))
    pair.engine.pause()
    waiting = asyncio.ensure_future(pair.stub().Generate(REQUEST, metadata=[("authorization", "Bearer secret")]))
    await pair.engine.wait_for(lambda: len(pair.engine.submissions) == 1)
    assert await pair.stub().Generate(REQUEST).code() is grpc.StatusCode.UNAUTHENTICATED
    status, _, _ = await http_answer(pair, head("/v1/completions"))
    assert status == 401
    pair.engine.resume()
    await waiting


async def test_draining_server_refuses_at_once(full_pair, monkeypatch):
    async def read_body(*args, **options):
        raise AssertionError("read")

    monkeypatch.setattr(runner, "read_body", read_body)
    drain = asyncio.create_task(full_pair.app.drain(20))
    await asyncio.sleep(0)
    assert await full_pair.stub().Generate(REQUEST).code() is grpc.StatusCode.UNAVAILABLE
    status, _, answer = await http_answer(full_pair, head("/v1/completions"))
    assert (status, answer["error"]["code"]) == (503, "server_draining")
    full_pair.engine.resume()
    await drain


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_draining_server_closes_the_connection_that_it_refuses_a_request_on(full_pair, path):
    drain = asyncio.create_task(full_pair.app.drain(20))
    await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", full_pair.app.http_port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    async with asyncio.timeout(HANG_S):
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nconnection: close\r\n" in answer.lower()
        await reader.read()  # until the connection is closed
    writer.close()
    full_pair.engine.resume()
    await drain
