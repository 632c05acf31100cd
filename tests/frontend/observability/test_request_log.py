"""`--log-requests` logs one line for each request over gRPC and HTTP, without its text."""

import asyncio
import json
import logging

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from frontend.observability import otlp
from frontend.observability.request_log import MAX_PROMPT_CHARS
from tests.support.frontend.fake_engine import rejection


@pytest.fixture
def lines(caplog):
    """lines() returns the request log's records so far."""
    caplog.set_level(logging.INFO, "frontend.requests")
    return lambda: [record for record in caplog.records if record.name == "frontend.requests"]


async def post(pair, path, **body):
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.http_port)
    data = json.dumps(body).encode()
    headers = ["host: x", "connection: close", "content-type: application/json", f"content-length: {len(data)}"]
    head = "\r\n".join([f"POST {path} HTTP/1.1", *headers, "", ""])
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    return answer


async def test_line_of_a_grpc_request_has_its_numbers_and_no_text(make_pair, text_request, lines, caplog):
    pair = await make_pair(log_requests=True)
    request = text_request("secret words", max_tokens=5)
    request.spec.request_id = "mine"
    async for _ in pair.stub().StreamGenerate(request):
        pass
    await pair.idle()
    (line,) = lines()
    assert (line.request_id, line.api, line.model) == ("mine", "grpc", "fake")
    assert line.call == "chairlift.v1.GenerationService/StreamGenerate"
    assert (line.num_prompt_tokens, line.num_cached_tokens, line.num_output_tokens) == (12, 1, 5)
    assert line.finish_reason == "length"
    assert 0 < line.ttft_s <= line.total_s
    assert not hasattr(line, "trace_id")
    assert line.getMessage().startswith("request_id=mine api=grpc call=chairlift.v1.GenerationService/StreamGenerate ")
    assert "secret" not in caplog.text


BAD_REQUESTS = [
    {"prompt": "secret", "guided_regex": "secret((("},
    {"prompt": "secret", "guided_json": {"type": "secret"}},
    {"prompt": "secret", "guided_grammar": "start: secret("},
    {"prompt": "secret \ud800"},
    {"prompt": ["secret", 1]},
    {"prompt": "secret", "temperature": "secret"},
    {"prompt": "secret" * 10_000},
    {"prompt": "a", "stop": "secret" * 1000},
    {"prompt": "a", "suffix": "secret"},
    {"prompt": "a", "model": "secret"},
]


async def test_no_log_line_of_any_level_quotes_a_bad_request(make_pair, caplog):
    """The answer to its client may quote it."""
    caplog.set_level(logging.DEBUG)
    pair = await make_pair(http=True, log_requests=True)
    for fields in BAD_REQUESTS:
        answer = await post(pair, "/v1/completions", **fields)
        assert b"400 Bad Request" in answer or b"404 Not Found" in answer, fields
        await pair.idle()
        assert "secret" not in caplog.text, fields


async def test_line_of_an_http_request_names_its_path(make_pair, lines):
    pair = await make_pair(http=True, log_requests=True)
    await post(pair, "/v1/completions", prompt="abc", request_id="r", max_tokens=20)
    await pair.idle()
    (line,) = lines()
    assert (line.request_id, line.api, line.call) == ("cmpl-r", "http", "POST /v1/completions")
    assert line.finish_reason == "stop"


async def test_refusal_is_found_by_the_id_in_its_response(make_pair, lines):
    pair = await make_pair(http=True, log_requests=True)
    head, _, _ = (await post(pair, "/v1/completions", prompt="abc", temperature=-1)).partition(b"\r\n\r\n")
    await pair.idle()
    (line,) = lines()
    assert line.finish_reason == "INVALID_REQUEST"
    assert f"x-request-id: {line.request_id}" in head.decode().splitlines()


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_prompt_is_logged_only_with_log_prompts_and_up_to_a_limit(make_pair, text_request, lines, log_prompts):
    pair = await make_pair(log_requests=True, log_prompts=log_prompts)
    text = "line\nline " + "x" * 2 * MAX_PROMPT_CHARS
    await pair.stub().Generate(pb.GenerateRequest(spec=text_request(text).spec))
    (line,) = lines()
    assert getattr(line, "prompt", None) == (text[:MAX_PROMPT_CHARS] if log_prompts else None)
    assert "\n" not in line.getMessage()


async def test_line_of_a_refused_request_has_the_error_code_that_its_client_got(make_pair, text_request, lines):
    pair = await make_pair(log_requests=True)
    refused = text_request("abc")
    refused.spec.request_id, refused.spec.model = "two\nlines", "another"
    shed = text_request("abc")
    pair.engine.rejections = [rejection(engine_pb.REJECTION_REASON_QUEUE_FULL, "256 wait")]
    for request in (refused, shed):
        with pytest.raises(grpc.aio.AioRpcError):
            await pair.stub().Generate(pb.GenerateRequest(spec=request.spec))
    await pair.idle()
    first, second = lines()
    assert (first.finish_reason, first.request_id) == ("MODEL_NOT_FOUND", "two\nlines")
    assert "request_id='two\\nlines'" in first.getMessage()
    assert (second.finish_reason, second.model) == ("QUEUE_FULL", "fake")


async def test_line_has_the_trace_id(make_pair, text_request, lines, monkeypatch):
    memory = InMemorySpanExporter()
    monkeypatch.setattr(otlp, "exporter", lambda endpoint: memory)
    pair = await make_pair(log_requests=True, otlp_traces_endpoint="http://127.0.0.1:4318")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    await pair.stub().Generate(
        pb.GenerateRequest(spec=text_request("abc").spec),
        metadata=(("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),),
    )
    await pair.idle()
    (line,) = lines()
    assert line.trace_id == trace_id


async def test_no_line_without_the_flag(pair, text_request, lines):
    await pair.stub().Generate(pb.GenerateRequest(spec=text_request("abc").spec))
    await pair.idle()
    assert lines() == []


def test_log_prompts_needs_log_requests():
    with pytest.raises(ConfigError, match="--log-prompts needs --log-requests"):
        FrontendConfig(log_prompts=True)
