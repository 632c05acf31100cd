import asyncio
import os
import socket
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.api.grpc.server import SERVICE_NAME
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from tests.hang import HANG_S
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'protos'}"


def reflection_stream(channel, version):
    return channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()


async def reflected_services(channel):
    call = ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    await call.done_writing()
    return names


async def test_broken_chat_template_is_logged_at_the_start_and_text_is_served(caplog, text_request):
    files = {**byte_tokenizer_files(), "chat_template.jinja": b"{% if %}"}
    engine = FakeEngine(files=files)
    app = FrontendApp(FrontendConfig(port=0, http=False, engine=(await engine.start(),)), warm_up=True)
    await app.start()
    async with asyncio.timeout(HANG_S), grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
        await app.wait_serving(None)
        await app._warm_up
        stub = GenerationServiceStub(channel)
        assert not (await stub.GetModel(pb.GetModelRequest())).has_chat_template
        assert "chat prompts are refused: the model's chat template cannot be compiled: line 1" in caplog.text
        assert (await stub.Generate(pb.GenerateRequest(spec=text_request("new").spec))).text == "new"
    await app.stop()
    await engine.kill()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no sockets for both IP versions")
@pytest.mark.parametrize("target", ["127.0.0.1", "::1"])
async def test_unspecified_ipv6_host_serves_both_ip_versions(target):
    try:
        socket.create_server((target, 0), family=socket.AF_INET6 if ":" in target else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    app = FrontendApp(FrontendConfig(host="::", port=0, http_port=0, insecure_bind=True))
    await app.start()
    try:
        for port in (app.port, app.http_port):
            _, writer = await asyncio.open_connection(target, port)
            writer.close()
    finally:
        await app.stop()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_both_versions_of_reflection_describe_every_service(pair, version):
    call = reflection_stream(pair.channel(), version)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = [service.name for service in (await call.read()).list_services_response.service]
    methods = {}
    for name in names:
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        pool = DescriptorPool()
        for file in reversed((await call.read()).file_descriptor_response.file_descriptor_proto):
            pool.AddSerializedFile(file)  # fails if a dependency is missing
        methods[name] = {method.name for method in pool.FindServiceByName(name).methods}
    await call.done_writing()
    assert methods == {
        SERVICE_NAME: {"Generate", "StreamGenerate", "CountTokens", "GetModel", "LoadAdapter", "UnloadAdapter"},
        "grpc.health.v1.Health": {"Check", "Watch", "List"},
        "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo"},
        "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo"},
    }


METHOD = "chairlift.v1.GenerationService.StreamGenerate"
DETAILS = ["google.rpc.ErrorInfo", "google.rpc.BadRequest", "google.rpc.RetryInfo"]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize("symbol", [METHOD, "grpc.health.v1.Health.Watch", "chairlift.v1.Finished.match", *DETAILS])
async def test_reflection_finds_methods_and_the_details_of_errors(pair, version, symbol):
    call = reflection_stream(pair.channel(), version)
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
    (data, *_) = (await call.read()).file_descriptor_response.file_descriptor_proto
    assert FileDescriptorProto.FromString(data).package == ".".join(takewhile(str.islower, symbol.split(".")))
    await call.done_writing()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_no_reflection_request_causes_a_defect(pair, version, caplog):
    texts = [
        "",
        ".",
        "..",
        "\x00",
        "é",
        "x" * 5000,
        SERVICE_NAME + ".",
        "." + SERVICE_NAME,
        METHOD + "x",
        "/etc/passwd",
    ]
    numbers = [0, -1, 2**31 - 1, -(2**31)]
    types = ["", "chairlift.v1.GenerationSpec", "google.protobuf.FileOptions"]
    request = reflection_pb2.ServerReflectionRequest
    questions = [request(**{name: text}) for text in texts for name in ("file_by_filename", "file_containing_symbol")]
    questions += [request(all_extension_numbers_of_type=text) for text in texts + types]
    for kind in types:
        extensions = [reflection_pb2.ExtensionRequest(containing_type=kind, extension_number=i) for i in numbers]
        questions += [request(file_containing_extension=extension) for extension in extensions]
    call = reflection_stream(pair.channel(), version)
    for question in [request(), *questions]:
        await call.write(question)
        assert (await call.read()).original_request == question
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_http_packages_are_not_imported_without_http():
    code = (
        "import sys; from frontend.app import FrontendApp; from frontend.config import FrontendConfig; "
        "FrontendApp(FrontendConfig(http=False)); "
        "sys.exit(bool({'starlette', 'uvicorn', 'pydantic'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": PYTHONPATH}).returncode == 0


async def test_reflection_can_be_disabled(make_pair):
    pair = await make_pair(reflection=False)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflected_services(pair.channel())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_unparsable_reflection_request_is_invalid(pair):
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    call = pair.channel().stream_stream(path)()
    await call.write(b"\x0a\x02\xff\xfe")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_drain_finishes_running_calls_and_refuses_new_ones(pair, text_request):
    pair.engine.pause()
    stub = pair.stub()
    calls = [stub.StreamGenerate(text_request("abc")) for _ in range(3)]
    await pair.engine.wait_for(lambda: pair.engine.num_open == 3)
    drain = asyncio.create_task(pair.app.drain(HANG_S))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb.GenerateRequest(spec=text_request("abc").spec))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in caught.value.details()
    pair.engine.resume()
    for call in calls:
        assert [message async for message in call][-1].HasField("finished")
    assert await drain == 3


class SlowProxy:
    """Forwards a connection to the frontend, and holds large answers back until `is_open` is set."""

    def __init__(self, port):
        self._port = port
        self.is_open = asyncio.Event()
        self.has_begun = asyncio.Event()

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1")
        return self._server.sockets[0].getsockname()[1]

    async def _serve(self, client, to_client):
        frontend, to_frontend = await asyncio.open_connection("127.0.0.1", self._port)
        there = asyncio.create_task(self._forward(client, to_frontend))
        await self._forward(frontend, to_client, gate=self.is_open)
        there.cancel()
        for end in (to_client, to_frontend, self._server):
            end.close()

    async def _forward(self, reader, writer, gate=None):
        while data := await reader.read(1 << 16):
            if gate is not None and len(data) > 10_000:  # an answer, not the connection's settings
                self.has_begun.set()
                await gate.wait()
            writer.write(data)
            await writer.drain()


async def test_drain_waits_until_answers_have_been_sent(make_pair, text_request):
    """On a slow connection, a call may have ended while most of its answer is still buffered."""
    pair = await make_pair(engine=FakeEngine(max_model_len=400_000, tokens_per_step=50_000))
    proxy = SlowProxy(pair.app.port)
    channel = grpc.aio.insecure_channel(
        f"127.0.0.1:{await proxy.start()}", options=[("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    )
    pair.channels.append(channel)
    request = pb.GenerateRequest(spec=text_request("x" * 150_000, max_tokens=150_000).spec)
    answer = asyncio.ensure_future(GenerationServiceStub(channel).Generate(request))
    async with asyncio.timeout(HANG_S):
        await proxy.has_begun.wait()
        await pair.app.calls.wait_idle()
        drain = asyncio.create_task(pair.app.drain(HANG_S))
        await asyncio.wait([drain], timeout=0.3)
        assert not drain.done()
        proxy.is_open.set()
        await drain
        await pair.app.stop()
        assert (await answer).text == "x" * 150_000


async def test_calls_beyond_the_grace_period_end_unavailable(pair, text_request):
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abc"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    assert await pair.app.drain(0.05) == 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "stopped" in caught.value.details()
    await pair.engine.wait_for(lambda: pair.engine.num_sessions == 0)


async def test_stop_ends_open_calls_unavailable(pair, text_request):
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abc"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    await pair.app.stop()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_port_in_use_is_a_config_error(pair):
    app = FrontendApp(FrontendConfig(port=pair.app.port, http=False))
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{pair.app.port}"):
        await app.start()
    await app.stop()


async def test_two_processes_can_share_a_port_with_reuse_port(make_pair):
    first = await make_pair(reuse_port=True)
    second = FrontendApp(FrontendConfig(port=first.app.port, reuse_port=True, http=False))
    await second.start()
    assert second.port == first.app.port
    await second.stop()


async def test_a_draining_frontend_leaves_shared_ports_to_the_other(make_pair, text_request):
    pair = await make_pair(reuse_port=True, http=True)
    first = pair.app
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))
    pair.engine.pause()
    running = pair.stub(*options).StreamGenerate(text_request("abc"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    old = pair.stub(*options)
    await old.GetModel(pb.GetModelRequest())
    engine = FakeEngine()
    second = FrontendApp(
        FrontendConfig(port=first.port, http_port=first.http_port, reuse_port=True, engine=(await engine.start(),))
    )
    await second.start()
    async with asyncio.timeout(HANG_S):
        await second.wait_serving(None)
        draining = asyncio.create_task(first.drain(HANG_S))
        await asyncio.sleep(0)
        for _ in range(20):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{first.port}", options) as channel:
                stub = GenerationServiceStub(channel)
                request = pb.GenerateRequest(spec=text_request("new").spec)
                # A connection that reaches a port while it closes is reset; gRPC then makes another one.
                assert (await stub.Generate(request, wait_for_ready=True)).text == "new"
            reader, writer = await asyncio.open_connection("127.0.0.1", first.http_port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
        request = pb.GenerateRequest(spec=text_request("same channel").spec)
        assert (await old.Generate(request, wait_for_ready=True)).text == "same channel"
        pair.engine.resume()
        assert "".join([message.chunk.text async for message in running]) == "abc"
        assert await draining == 1
    await second.stop()
    await engine.kill()


@pytest.mark.slow
async def test_client_may_ping_while_it_waits(pair, text_request):
    """gRPC's default would end a call with "Too many pings" after three of them during a long prefill."""
    pair.engine.pause()
    stub = pair.stub(
        ("grpc.keepalive_time_ms", 5100), ("grpc.keepalive_timeout_ms", 5000), ("grpc.http2.max_pings_without_data", 0)
    )
    call = stub.StreamGenerate(text_request("abc"))
    done, _ = await asyncio.wait([asyncio.ensure_future(call.code())], timeout=22)
    assert not done
    pair.engine.resume()
    assert [message async for message in call][-1].HasField("finished")


async def test_more_than_a_thousand_calls_at_once_are_all_served(make_pair):
    pair = await make_pair(max_queued_requests=5000)
    stub = pair.stub()
    calls = [stub.Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="ab"))) for _ in range(1100)]
    answers = await asyncio.gather(*calls)
    assert all(answer.text == "ab" for answer in answers)


@pytest.mark.slow
async def test_old_connection_is_left_without_an_error(make_pair, text_request):
    """What a rolling update relies on: a client that always calls has a new connection before the server drains."""
    pair = await make_pair(max_connection_age_s=1.0)
    proxy = CountingProxy(pair.app.port)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{await proxy.start()}", options=options)
    pair.channels.append(channel)
    stub = GenerationServiceStub(channel)
    async with asyncio.timeout(HANG_S):
        while proxy.num_connections < 3:
            await stub.Generate(pb.GenerateRequest(spec=text_request("abc").spec))
    await proxy.stop()


async def test_calls_on_an_old_connection_have_as_long_as_their_deadline(make_pair, monkeypatch):
    """A grace period would cut them before it."""
    options = []
    server = grpc.aio.server
    monkeypatch.setattr(
        grpc.aio, "server", lambda **settings: options.extend(settings["options"]) or server(**settings)
    )
    await make_pair()
    assert "grpc.max_connection_age_ms" in dict(options)
    assert "grpc.max_connection_age_grace_ms" not in dict(options)


class CountingProxy:
    """Forwards connections to the frontend, and counts them."""

    def __init__(self, port):
        self._port = port
        self.num_connections = 0

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1")
        return self._server.sockets[0].getsockname()[1]

    async def stop(self):
        self._server.close()

    async def _serve(self, client, to_client):
        self.num_connections += 1
        frontend, to_frontend = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._forward(client, to_frontend), self._forward(frontend, to_client))

    async def _forward(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()
