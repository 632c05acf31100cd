"""Traces of requests over gRPC and HTTP, read from an in-memory exporter and from a collector over OTLP/HTTP."""

import asyncio
import gzip
import logging
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from frontend.observability import otlp
from tests.hang import HANG_S
from tests.support.frontend.fake_engine import rejection

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
PHASES = ["queue", "prefill", "decode"]


@pytest.fixture
async def traced(make_pair, monkeypatch):
    """A pair whose spans stay in `memory`; `spans()` waits until all have ended and returns them by name."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr(otlp, "exporter", lambda endpoint: memory)
    pair = await make_pair(http=True, otlp_traces_endpoint="http://127.0.0.1:4318")

    async def spans():
        await pair.idle()
        await asyncio.to_thread(pair.app._spans._provider.force_flush)
        return {span.name: span for span in memory.get_finished_spans()}

    pair.memory, pair.spans = memory, spans
    return pair


async def stream(pair, spec, metadata=()):
    return [
        message async for message in pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=spec), metadata=metadata)
    ]


async def test_request_is_a_server_span_with_child_spans_for_its_phases_and_without_text(traced):
    spec = pb.GenerationSpec(
        text="secret words", request_id="mine", sampling=pb.SamplingOptions(temperature=0.5, seed=2**64 - 1)
    )
    spec.stop.max_tokens = 5
    before_ns = time.time_ns()
    await stream(traced, spec, (("traceparent", TRACEPARENT),))
    spans = await traced.spans()
    assert sorted(spans) == sorted(["chairlift.v1.GenerationService/StreamGenerate", *PHASES])
    server = spans["chairlift.v1.GenerationService/StreamGenerate"]
    assert server.kind is SpanKind.SERVER
    assert server.status.status_code is StatusCode.UNSET
    assert f"{server.context.trace_id:032x}" == TRACE_ID
    assert f"{server.parent.span_id:016x}" == PARENT_ID
    assert server.attributes == {
        "rpc.system": "grpc",
        "rpc.service": "chairlift.v1.GenerationService",
        "rpc.method": "StreamGenerate",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "chairlift",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 5,
    }
    assert before_ns <= server.start_time <= server.end_time <= time.time_ns()
    for name in PHASES:
        span = spans[name]
        assert (span.parent.span_id, span.context.trace_id) == (server.context.span_id, server.context.trace_id)
        assert server.start_time <= span.start_time <= span.end_time
    assert spans["queue"].end_time - spans["queue"].start_time >= 1_000_000  # as FakeEngine reports
    assert spans["prefill"].end_time - spans["prefill"].start_time == pytest.approx(2_000_000, abs=1000)
    assert "secret" not in "".join(span.to_json() for span in spans.values())


async def test_http_requests_have_a_span_for_each_prompt_and_honor_traceparent(traced):
    url = f"http://127.0.0.1:{traced.app.http_port}/v1/completions"
    body = {"model": "fake", "prompt": ["ab", "cd"], "n": 2}
    headers = {"traceparent": TRACEPARENT}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        assert response.status == 200
    await traced.spans()
    servers = [span for span in traced.memory.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert [span.name for span in servers] == ["POST /v1/completions"] * 2
    for span in servers:
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.attributes["http.request.method"] == "POST"
        assert span.attributes["gen_ai.request.model"] == "fake"
        assert span.attributes["gen_ai.request.choice.count"] == 2
        assert span.attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")


async def test_concurrent_calls_keep_their_own_trace(traced):
    contexts = [f"00-{i:032x}-{PARENT_ID}-01" for i in range(1, 21)]
    await asyncio.gather(
        *(
            stream(traced, pb.GenerationSpec(text="x", request_id=context), (("traceparent", context),))
            for context in contexts
        )
    )
    await traced.spans()
    servers = [span for span in traced.memory.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert len(servers) == 20
    for span in servers:
        assert span.attributes["gen_ai.response.id"].split("-")[1] == f"{span.context.trace_id:032x}"


@pytest.mark.parametrize("context", ["", "00-0-0-01", "x" * 5000, f"00-{'0' * 32}-{PARENT_ID}-01"])
async def test_invalid_traceparent_starts_a_new_trace(traced, context):
    await stream(traced, pb.GenerationSpec(text="x"), (("traceparent", context),))
    server = (await traced.spans())["chairlift.v1.GenerationService/StreamGenerate"]
    assert server.parent is None
    assert server.context.is_valid


async def refused(pair):
    await stream(pair, pb.GenerationSpec(text=""))


async def shed(pair):
    pair.engine.rejections.append(rejection(engine_pb.REJECTION_REASON_QUEUE_FULL, "full"))
    await stream(pair, pb.GenerationSpec(text="x"))


async def out_of_time(pair):
    pair.engine.pause()
    try:
        await pair.stub().Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="x")), timeout=5.0)
    finally:
        await pair.engine.wait_for(lambda: pair.engine.cancels)  # the server's clock runs out after the client's
        pair.engine.resume()


async def cancelled(pair):
    pair.engine.pause()
    call = pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="abc" * 100)))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    await pair.engine.step()
    await call.read()
    call.cancel()
    await pair.engine.wait_for(lambda: pair.engine.cancels)
    pair.engine.resume()
    raise grpc.RpcError


@pytest.mark.parametrize(
    ("fail", "code"),
    [(refused, "INVALID_REQUEST"), (shed, "QUEUE_FULL"), (out_of_time, "DEADLINE_EXCEEDED"), (cancelled, "CANCELLED")],
)
async def test_failed_request_sets_the_status_of_its_span(traced, fail, code):
    with pytest.raises(grpc.RpcError):
        await fail(traced)
    spans = await traced.spans()
    (server,) = (span for span in spans.values() if span.kind is SpanKind.SERVER)
    assert (server.status.status_code, server.status.description) == (StatusCode.ERROR, code)
    assert server.attributes["error.type"] == code
    assert "decode" not in spans or fail is cancelled


async def test_phases_are_complete_even_if_a_stop_text_ends_the_request_first(traced):
    traced.engine.pause()
    call = asyncio.create_task(stream(traced, pb.GenerationSpec(text="abcdef", stop=pb.StopOptions(stop_texts=["b"]))))
    await traced.engine.wait_for(lambda: traced.engine.num_open == 1)
    await traced.engine.step()
    await traced.engine.step()
    await call  # FakeEngine has not answered the cancellation
    traced.engine.resume()
    assert sorted(await traced.spans()) == sorted(["chairlift.v1.GenerationService/StreamGenerate", *PHASES])


async def test_opentelemetrys_environment_variable_sets_the_sampling(make_pair, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    memory = InMemorySpanExporter()
    monkeypatch.setattr(otlp, "exporter", lambda endpoint: memory)
    pair = await make_pair(otlp_traces_endpoint="http://127.0.0.1:4318")
    await stream(pair, pb.GenerationSpec(text="x"))
    await stream(pair, pb.GenerationSpec(text="x"), (("traceparent", TRACEPARENT),))
    await pair.idle()
    await asyncio.to_thread(pair.app._spans._provider.force_flush)
    assert {f"{span.context.trace_id:032x}" for span in memory.get_finished_spans()} == {TRACE_ID}


@pytest.fixture
def collector():
    """An OTLP receiver over HTTP; `requests` and `paths` record what it received. It answers while `hold` is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            server.hold.wait(100)
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            server.paths.append(self.path)
            server.requests.append(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.paths, server.requests, server.hold = [], [], threading.Event()
    server.hold.set()
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    server.server_close()
    thread.join()


async def test_collector_gets_the_spans_when_the_server_stops(make_pair, collector):
    pair = await make_pair(otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}")
    await stream(pair, pb.GenerationSpec(text="x"))
    await pair.idle()
    await pair.app.stop()
    assert collector.paths == ["/v1/traces"]
    ((resource,),) = (request.resource_spans for request in collector.requests)
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert names["service.name"] == "chairlift-frontend"
    spans = resource.scope_spans[0].spans
    assert sorted(span.name for span in spans) == sorted(["chairlift.v1.GenerationService/StreamGenerate", *PHASES])
    assert len({span.trace_id for span in spans}) == 1


async def test_collector_that_does_not_answer_delays_no_request(make_pair, collector, monkeypatch, caplog):
    monkeypatch.setattr(otlp, "FLUSH_TIMEOUT_S", 0.3)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    collector.hold.clear()
    pair = await make_pair(otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}")
    for _ in range(8):  # more spans than the queue keeps
        assert len(await stream(pair, pb.GenerationSpec(text="x"))) >= 3
    await pair.idle()
    await pair.app.stop()
    assert "could not be sent" in caplog.text
    assert collector.requests == []  # it has not answered the first one: no request waited for it
    collector.hold.set()  # ends the exporter's thread, which would log during later tests
    for thread in threading.enumerate():
        if thread.name == "last-spans":
            await asyncio.to_thread(thread.join, HANG_S)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/other"])
def test_spans_are_sent_to_the_default_path_unless_the_url_has_one(path):
    exporter = otlp.exporter(f"http://127.0.0.1:4318{path}")
    assert exporter._endpoint == f"http://127.0.0.1:4318{path if len(path) > 1 else '/v1/traces'}"
    exporter.shutdown()


def test_unreachable_collector_is_logged_once_a_minute(monkeypatch, caplog):
    log = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setattr(log, "filters", [])
    now_s = 0.0
    monkeypatch.setattr(otlp, "_rate_limit", otlp.RateLimitFilter(clock=lambda: now_s))
    for _ in range(2):
        otlp.exporter("http://127.0.0.1:4318").shutdown()
    for now_s in (0.0, 1.0, 59.0, 60.0, 61.0, 119.0, 120.0):
        log.warning("at %g", now_s)
    assert [record.getMessage() for record in caplog.records if record.name == log.name] == ["at 0", "at 60", "at 120"]


def test_flag_needs_the_opentelemetry_packages(monkeypatch):
    monkeypatch.delitem(sys.modules, "frontend.observability.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    config = FrontendConfig(otlp_traces_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint needs .* pip install 'chairlift\[otel\]'"):
        FrontendApp(config)


async def test_opentelemetry_is_not_imported_without_the_flag(make_pair, monkeypatch):
    monkeypatch.delitem(sys.modules, "frontend.observability.otlp")
    pair = await make_pair()
    await stream(pair, pb.GenerationSpec(text="x"), (("traceparent", TRACEPARENT),))
    assert "frontend.observability.otlp" not in sys.modules


@pytest.mark.parametrize("url", ["collector:4318", "ftp://x", "http://", "http://x:99999"])
def test_flag_that_is_not_a_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint is .*, it must be a URL"):
        FrontendConfig(otlp_traces_endpoint=url)
