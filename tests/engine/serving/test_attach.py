"""Who is let onto the engine's stream, and what it is told first."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from engine.interfaces import DrainReport, Inbox, LoopSnapshot
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.grammar_compiler import GrammarCompiler
from engine.serving.listener import Listener
from engine.serving.server import EngineService, ServingParts
from tests.hang import HANG_S
from tests.support.engine.client import AttachClient, engine_status
from tests.support.engine.fake_engine import FAKE_TOKENIZER, RunningEngine, fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel

NO_GRAMMARS = GrammarCompiler(TokenizerFiles(()), 64, frozenset())


@pytest.fixture
async def server() -> AsyncIterator[RunningEngine]:
    async with run_engine(fake_engine_parts(model=FakeModel(end_probability=0.0))) as server:
        yield server


async def refusal(address: str, *messages: pb.AttachRequest) -> grpc.aio.AioRpcError:
    """The status with which the engine ends a stream of these messages."""
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


async def test_attach_is_unavailable_while_loading_and_says_how_far() -> None:
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
    """A call whose first write, the welcome, waits until it is let go."""

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


async def test_what_happens_while_the_welcome_is_written_reaches_that_frontend_too() -> None:
    parts = fake_engine_parts()
    service, context = EngineService(), SlowContext()
    snapshot = LoopSnapshot(0, 0, parts.scheduler.stats())
    service.set_serving(ServingParts(parts.info, Inbox(), parts.max_open_requests, lambda: snapshot, NO_GRAMMARS))
    attach = asyncio.create_task(service.Attach(context, context))  # type: ignore[arg-type]
    await context.is_writing.wait()
    service.deliver(DrainReport(30.0))
    service.finish("the engine stopped")
    context.let_go.set()
    await asyncio.wait_for(attach, HANG_S)
    assert context.sent == ["welcome", "drain", "status"]


async def test_no_frontend_is_welcome_once_the_step_loop_has_ended() -> None:
    parts = fake_engine_parts()
    service = EngineService()
    listener = Listener(service, "127.0.0.1:0")
    await listener.start()
    try:
        snapshot = LoopSnapshot(0, 0, parts.scheduler.stats())
        service.set_serving(ServingParts(parts.info, Inbox(), parts.max_open_requests, lambda: snapshot, NO_GRAMMARS))
        service.finish("the engine stopped")
        error = await asyncio.wait_for(refusal(listener.address, hello()), HANG_S)
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the engine stopped")
    finally:
        await listener.stop(0)


async def test_status_call_tells_state_and_model(server: RunningEngine) -> None:
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
async def test_streams_that_break_the_protocol_are_refused(
    server: RunningEngine, messages: list[pb.AttachRequest], code: str, words: list[str]
) -> None:
    error = await refusal(server.address, *messages)
    assert error.code().name == code
    for word in words:
        assert word in (error.details() or "")


async def test_a_matching_tokenizer_hash_is_welcome(server: RunningEngine) -> None:
    greeting = pb.Hello(protocol_major=1, protocol_minor=7, tokenizer_sha256=FAKE_TOKENIZER.sha256())
    async with AttachClient.open(server.address, hello=greeting) as client:
        assert client.welcome.protocol_minor == 0


async def test_tokenizer_files_come_in_chunks_of_at_most_a_mebibyte() -> None:
    files = (("empty.json", b""), ("tokenizer.json", bytes(range(256)) * 10_000))
    parts = dataclasses.replace(fake_engine_parts(), tokenizer=TokenizerFiles(files))
    received: dict[str, bytes] = {}
    async with run_engine(parts) as server, grpc.aio.insecure_channel(server.address) as channel:
        async for part in EngineServiceStub(channel).GetTokenizer(pb.GetTokenizerRequest()):
            assert len(part.data) <= 1 << 20
            received[part.file_name] = received.get(part.file_name, b"") + part.data
    assert tuple(received.items()) == files


async def test_frequent_pings_of_a_frontend_do_not_end_its_stream(server: RunningEngine) -> None:
    # gRPC's client pings once per second at most, and its server forgives two pings on a stream without data.
    options = (
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        call = EngineServiceStub(channel).Attach()  # no hello yet: nothing flows but pings
        status = asyncio.create_task(call.code())
        ended, _ = await asyncio.wait({status}, timeout=5)
        assert not ended
        call.cancel()
        await status
