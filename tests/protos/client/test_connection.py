"""Tests of `chairlift.client.connection`."""

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from chairlift import AsyncClient, Client
from chairlift.client.connection import channel_options
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1 import generation_service_pb2_grpc as pb_grpc

NO_PROXY = ("grpc.enable_http_proxy", 0)


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server on 127.0.0.1 that says which model it has."""

    class Service(pb_grpc.GenerationServiceServicer):
        def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:
            return pb.GetModelResponse(model="near")

        def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
            return pb.GenerateResponse(text=request.spec.text * (20 << 20))

    server = grpc.server(ThreadPoolExecutor(1))
    pb_grpc.add_GenerationServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_proxy_in_the_environment_is_not_asked_for_this_machine(
    host: str, variable: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:1")  # nothing listens there
    with Client(f"{host}:{port}") as client:
        assert client.get_model(timeout_s=20).model == "near"

    async def ask() -> str:
        async with AsyncClient(f"{host}:{port}") as client:
            return (await client.get_model(timeout_s=20)).model

    assert asyncio.run(ask()) == "near"


def test_an_answer_may_have_any_size(port: int) -> None:
    """128 answers of 1,000 tokens with 20 alternatives each have 17 MiB; gRPC's default limit is 4."""
    with Client(f"127.0.0.1:{port}") as client:
        assert len(client.generate("x").text) == 20 << 20

    async def ask() -> int:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            return len((await client.generate("x")).text)

    assert asyncio.run(ask()) == 20 << 20


@pytest.mark.parametrize("timeout_s", [1e10, math.inf])
def test_a_timeout_beyond_what_grpc_can_add_to_the_time_does_not_pass_at_once(timeout_s: float, port: int) -> None:
    with Client(f"127.0.0.1:{port}") as client:
        assert client.get_model(timeout_s=timeout_s).model == "near"

    async def ask() -> str:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            return (await client.get_model(timeout_s=timeout_s)).model

    assert asyncio.run(ask()) == "near"


def test_a_server_that_was_away_is_tried_again_within_seconds() -> None:
    assert ("grpc.max_reconnect_backoff_ms", 5_000) in channel_options("example.org:1")


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "ipv4:127.0.0.1:1", "ipv6:[::1]:1", "dns:///localhost:1"],
)
def test_loopback_targets_bypass_proxies(target: str) -> None:
    assert NO_PROXY in channel_options(target)


@pytest.mark.parametrize("target", ["example.org:1", "10.0.0.1:1", "[2001:db8::1]:1", "localhost.example.org:1", ""])
def test_other_targets_may_need_a_proxy(target: str) -> None:
    assert NO_PROXY not in channel_options(target)
