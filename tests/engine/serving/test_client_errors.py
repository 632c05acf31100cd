"""Invalid calls and disconnecting clients cause a status, and no log line above a warning."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc._cython.cygrpc import ExecuteBatchError

from chairlift.engine.v1 import engine_service_pb2 as pb
from tests.support.engine.client import AttachClient
from tests.support.engine.fake_engine import fake_engine_parts, run_engine

SERVICE, HEALTH = "/chairlift.engine.v1.EngineService/", "/grpc.health.v1.Health/"
UNARY = [SERVICE + "GetEngineStatus", HEALTH + "Check", HEALTH + "List"]
METHODS = [*UNARY, SERVICE + "GetTokenizer", HEALTH + "Watch", SERVICE + "Attach"]
GARBAGE = b"\x0a\x02\xff"


@pytest.fixture
async def address(caplog: pytest.LogCaptureFixture) -> AsyncIterator[str]:
    async with run_engine(fake_engine_parts()) as server:
        yield server.address
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.WARNING] == []


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_the_clients_error(channel: grpc.aio.Channel, method: str) -> None:
    call = channel.stream_stream(method)()
    await call.write(GARBAGE)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_invalid_message_ends_only_its_stream(address: str, channel: grpc.aio.Channel) -> None:
    async with AttachClient.open(address) as client:
        hello = pb.AttachRequest(command_seq=1, hello=pb.Hello(protocol_major=1))
        call = channel.stream_stream(SERVICE + "Attach", response_deserializer=pb.AttachResponse.FromString)()
        await call.write(hello.SerializeToString())
        while (await call.read()).WhichOneof("event") != "welcome":
            pass
        await call.write(GARBAGE)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be parsed" in await call.details()
        await client.send(ack=pb.StepAck(step_seq=0))  # the other stream goes on


async def test_unknown_methods_are_unimplemented(channel: grpc.aio.Channel) -> None:
    for method in (SERVICE + "Nothing", "/x/y", "/", "//", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_clients_that_leave_at_any_moment_leave_no_traceback(channel: grpc.aio.Channel) -> None:
    rng = random.Random(14)
    calls = []
    for _ in range(400):
        call = channel.stream_stream(rng.choice(METHODS))()
        calls.append(call)  # held: a call that is garbage is cancelled by grpc
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, ExecuteBatchError):
            for _ in range(rng.randrange(3)):
                await call.write(rng.choice([b"", GARBAGE]))
            if rng.random() < 0.5:
                await call.done_writing()
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        call.cancel()
    assert (await channel.unary_unary(HEALTH + "Check")(b"")) == b"\x08\x01"
