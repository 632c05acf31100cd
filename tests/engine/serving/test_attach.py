"""The handshake of the Attach stream: which frontends are accepted, and the first messages."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from chairlift.service.engine_protocol import PROTOCOL_MINOR
from engine.interfaces import DrainReport, Inbox, LoopSnapshot
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.listener import Listener
from engine.serving.server import EngineService
from tests.hang import HANG_S
from tests.support.engine.client import AttachClient, engine_status
from tests.support.engine.fake_engine import FAKE_TOKENIZER, RunningEngine, fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel


@pytest.fixture
async def server() -> AsyncIterator[RunningEngine]:
    async with run_engine(fake_engine_parts(model=FakeModel(end_probability=0.0))) as server:
        yield server


async def refusal(address: str, *messages: pb.AttachRequest) -> grpc.aio.AioRpcError:
    """Sends these messages and returns the status with which the engine ends the stream."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = EngineServiceStub(channel).Attach()
        try:
            for message in messages:
                await call.write(message)
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error
    raise AssertionError("the stream ended with OK")


def hello(**fields: object) -> pb.AttachRequest:
    return pb.AttachRequest(command_seq=1, hello=pb.Hello(protocol_major=1, **fields))  # type: ignore[arg-type]


async def test_attach_is_unavailable_while_loading_with_the_progress_as_detail() -> None:
    service = EngineService()
    listener = Listener(service, "127.0.0.1:0")
    await listener.start()
    try:
        service.set_loading("loading weights 43 %")
        error = await refusal(listener.address, hello())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "loading weights 43 %"
        response = await engine_status(listener.address)
        assert response.status.state == pb.ENGINE_STATE_LOADING
        assert response.status.detail == "loading weights 43 %"
        assert not response.HasField("info")
    finally:
        await listener.stop(0)


class SlowContext:
    """A call whose writes, the welcome first, block until `let_go` is set."""

    def __init__(self) -> None:
        self.is_writing = asyncio.Event()
        self.let_go = asyncio.Event()
        self.sent: list[str | None] = []
        self._hello: pb.AttachRequest | None = hello()

    async def read(self) -> pb.AttachRequest:
        if self._hello is None:
            await asyncio.Event().wait()
        message, self._hello = self._hello, None
        assert message is not None
        return message

    async def write(self, message: pb.AttachResponse) -> None:
        self.is_writing.set()
        await self.let_go.wait()
        self.sent.append(message.WhichOneof("event"))


async def test_events_during_the_write_of_the_welcome_reach_that_frontend() -> None:
    parts = fake_engine_parts()
    service, context = EngineService(), SlowContext()
    snapshot = LoopSnapshot(0, 0, parts.scheduler.stats())
    service.set_serving(parts, Inbox(), lambda: snapshot)
    attach = asyncio.create_task(service.Attach(context, context))  # type: ignore[arg-type]
    await context.is_writing.wait()
    service.deliver(DrainReport(30.0))
    service.finish("the engine stopped")
    context.let_go.set()
    await asyncio.wait_for(attach, HANG_S)
    assert context.sent == ["welcome", "drain", "status"]


async def test_attach_is_unavailable_once_the_step_loop_has_ended() -> None:
    parts = fake_engine_parts()
    service = EngineService()
    listener = Listener(service, "127.0.0.1:0")
    await listener.start()
    try:
        snapshot = LoopSnapshot(0, 0, parts.scheduler.stats())
        service.set_serving(parts, Inbox(), lambda: snapshot)
        service.finish("the engine stopped")
        error = await asyncio.wait_for(refusal(listener.address, hello()), HANG_S)
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the engine stopped")
    finally:
        await listener.stop(0)


async def test_status_call_returns_state_and_model(server: RunningEngine) -> None:
    response = await engine_status(server.address)
    assert response.status.state == pb.ENGINE_STATE_SERVING
    assert response.info.model == "fake"
    assert response.engine_instance_id


@pytest.mark.parametrize(
    ("messages", "code", "words"),
    [
        (
            [pb.AttachRequest(command_seq=1, hello=pb.Hello(protocol_major=2))],
            "FAILED_PRECONDITION",
            ["is 2", "has 1"],
        ),
        ([hello(tokenizer_sha256=b"x" * 32)], "FAILED_PRECONDITION", ["tokenizer_sha256"]),
        ([pb.AttachRequest(command_seq=1, ack=pb.StepAck())], "INVALID_ARGUMENT", ["must be hello"]),
        ([hello(), hello()], "INVALID_ARGUMENT", ["command_seq is 1 after 1"]),
        ([hello(), pb.AttachRequest(command_seq=2, hello=pb.Hello())], "INVALID_ARGUMENT", ["second hello"]),
        ([hello(), pb.AttachRequest(command_seq=2)], "INVALID_ARGUMENT", ["does not know"]),
        (
            [hello(), pb.AttachRequest(command_seq=2, ack=pb.StepAck(step_seq=9))],
            "INVALID_ARGUMENT",
            ["9", "0 were sent"],
        ),
        (
            [hello(), pb.AttachRequest(command_seq=2, credit=pb.CreditGrant(handles=[1]))],
            "INVALID_ARGUMENT",
            ["credit"],
        ),
    ],
)
async def test_protocol_errors_end_the_stream(
    server: RunningEngine, messages: list[pb.AttachRequest], code: str, words: list[str]
) -> None:
    error = await refusal(server.address, *messages)
    assert error.code().name == code
    for word in words:
        assert word in (error.details() or "")


async def test_a_matching_tokenizer_digest_is_accepted(server: RunningEngine) -> None:
    greeting = pb.Hello(protocol_major=1, protocol_minor=7, tokenizer_sha256=FAKE_TOKENIZER.sha256())
    async with AttachClient.open(server.address, hello=greeting) as client:
        assert client.welcome.protocol_minor == PROTOCOL_MINOR < 7


async def test_tokenizer_files_come_in_chunks_of_at_most_a_mebibyte() -> None:
    files = (("empty.json", b""), ("tokenizer.json", bytes(range(256)) * 10_000))
    parts = dataclasses.replace(fake_engine_parts(), tokenizer=TokenizerFiles(files))
    received: dict[str, bytes] = {}
    async with run_engine(parts) as server, grpc.aio.insecure_channel(server.address) as channel:
        async for part in EngineServiceStub(channel).GetTokenizer(pb.GetTokenizerRequest()):
            assert len(part.data) <= 1 << 20
            received[part.file_name] = received.get(part.file_name, b"") + part.data
    assert tuple(received.items()) == files


async def test_frequent_pings_do_not_close_the_connection(server: RunningEngine) -> None:
    """By default gRPC closes it at the third ping. Its clients ping once per second at most: hence raw frames."""
    settings, ping = b"\0\0\0\4" + bytes(5), b"\0\0\10\6" + bytes(5 + 8)
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    for _ in range(10):
        writer.write(ping)
        kind = None
        while kind != (6, 1):  # the acknowledgement
            header = await asyncio.wait_for(reader.readexactly(9), HANG_S)
            payload = await reader.readexactly(int.from_bytes(header[:3]))
            kind = header[3], header[4]
            assert header[3] != 7, f"GOAWAY: {payload!r}"
    writer.close()
