"""API keys over gRPC, for every method that the frontend registers."""

import contextlib
import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from chairlift.v1 import generation_service_pb2 as pb
from tests.hang import HANG_S

KEY = "the-key-of-this-test"
BAD = {
    "none": (),
    "wrong": (("authorization", "Bearer wrong"),),
    "empty": (("authorization", ""),),
    "empty key": (("authorization", "Bearer "),),
    "10 KB": (("authorization", "Bearer " + "k" * 10_000),),
    "elsewhere": (("x-api-key", KEY),),
    "twice": (("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")),
}


@pytest.fixture
def registered(monkeypatch):
    """Every method that servers started from here on get, by its path."""
    methods = {}

    def record(service, handlers):
        if service != "chairlift.engine.v1.EngineService":  # the fake engine's own server
            methods.update({f"/{service}/{name}": handler for name, handler in handlers.items()})
        return real(service, handlers)

    real = grpc.method_handlers_generic_handler
    monkeypatch.setattr("grpc.method_handlers_generic_handler", record)
    return methods


async def status_of(channel, path, handler, metadata):
    """The status of a call with one empty message, of the method's own kind."""
    if handler.request_streaming:
        call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=HANG_S)
    elif handler.response_streaming:
        call = channel.unary_stream(path)(b"", metadata=metadata, timeout=HANG_S)
    else:
        call = channel.unary_unary(path)(b"", metadata=metadata, timeout=HANG_S)
    if handler.response_streaming:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:  # the status comes after the last message
                pass
    return await call.code(), await call.details()


@pytest.mark.parametrize("bad", BAD)
async def test_every_method_refuses_a_call_without_a_key_except_health(registered, make_pair, caplog, bad):
    caplog.set_level(logging.DEBUG)
    pair = await make_pair(api_key=("other", KEY))
    channel = pair.channel()
    assert {name.split("/")[1] for name in registered} >= {
        "chairlift.v1.GenerationService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    own = {f"/chairlift.v1.GenerationService/{method.name}" for method in service_methods()}
    assert own <= registered.keys()
    guarded = {path: each for path, each in registered.items() if not path.startswith("/grpc.health.v1.Health/")}
    guarded["/chairlift.v1.GenerationService/NoSuchMethod"] = guarded["/chairlift.v1.GenerationService/Generate"]
    for path, handler in guarded.items():
        code, details = await status_of(channel, path, handler, BAD[bad])
        assert (path, code) == (path, grpc.StatusCode.UNAUTHENTICATED)
        assert "authorization: Bearer KEY" in details
    check = health_pb2.HealthCheckRequest(service="chairlift.v1.GenerationService")
    stub = HealthStub(channel)
    assert (await stub.Check(check, metadata=BAD[bad])).status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(check, metadata=BAD[bad])
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    assert KEY not in caplog.text


def service_methods():
    return pb.DESCRIPTOR.services_by_name["GenerationService"].methods


@pytest.mark.parametrize("key", [KEY, "other"])
async def test_with_a_key_every_method_answers(registered, make_pair, key):
    pair = await make_pair(api_key=("other", KEY))
    channel = pair.channel()
    metadata = (("authorization", f"Bearer {key}"),)
    for path, handler in registered.items():
        if path == "/grpc.health.v1.Health/Watch":  # has no end
            continue
        code, _ = await status_of(channel, path, handler, metadata)
        assert code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.DEADLINE_EXCEEDED), path
    spec = pb.GenerationSpec(text="abc")
    response = await pair.stub().Generate(pb.GenerateRequest(spec=spec), metadata=metadata)
    assert response.text == "abc"
