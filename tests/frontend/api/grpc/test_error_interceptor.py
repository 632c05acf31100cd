"""Errors inside a handler: the client always gets a meaningful status."""

import asyncio
import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import ModelNotFound
from tests.hang import HANG_S

METHODS = ["Generate", "StreamGenerate"]


def start(pair, method):
    spec = pb.GenerationSpec(text="abc")
    if method == "Generate":
        return pair.stub().Generate(pb.GenerateRequest(spec=spec))
    return pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=spec))


async def code_of(call):
    """The status code of a call, all of whose messages are read first: it comes behind them."""
    async with asyncio.timeout(HANG_S):
        while hasattr(call, "read") and isinstance(await failure_or_message(call), pb.StreamGenerateResponse):
            pass
        return await call.code()


async def failure_or_message(call):
    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        return error


@pytest.mark.parametrize("method", METHODS)
async def test_defect_is_internal_and_in_the_log(pair, monkeypatch, caplog, method):
    def broken(*args, **options):
        raise KeyError("defect")

    monkeypatch.setattr("frontend.generation.generation.tokenize", broken)
    call = start(pair, method)
    assert await code_of(call) is grpc.StatusCode.INTERNAL
    assert "defect" not in await call.details()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info[0] is KeyError


@pytest.mark.parametrize("method", METHODS)
async def test_defect_in_the_middle_of_an_answer(pair, monkeypatch, method):
    def broken(*args, **options):
        raise KeyError("defect")

    monkeypatch.setattr("frontend.generation.answer.answer_text.AnswerText.push", broken)
    assert await code_of(start(pair, method)) is grpc.StatusCode.INTERNAL
    await pair.idle()


@pytest.mark.parametrize("method", METHODS)
async def test_cancellation_from_inside_does_not_leave_the_client_waiting(pair, monkeypatch, method):
    async def cancelled(*args, **options):
        raise asyncio.CancelledError

    monkeypatch.setattr("frontend.generation.generation.tokenize", cancelled)
    assert await code_of(start(pair, method)) is grpc.StatusCode.INTERNAL


async def test_error_for_a_client_that_has_left(pair, monkeypatch, caplog):
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def stubborn(*args, **options):
        entered.set()
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()
        raise ModelNotFound("too late")

    monkeypatch.setattr("frontend.generation.generation.tokenize", stubborn)
    for method in METHODS:
        entered.clear()
        go_on.clear()
        call = start(pair, method)
        await entered.wait()
        call.cancel()
        await asyncio.wait([asyncio.ensure_future(call.code())])
        go_on.set()
        await pair.app.calls.wait_idle()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_unknown_method_is_unimplemented(pair):
    call = pair.channel().unary_unary("/chairlift.v1.GenerationService/Nothing")(b"")
    assert await code_of(call) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate", "GetModel"])
async def test_call_without_a_request_is_refused(pair, method):
    call = pair.channel().stream_stream(f"/chairlift.v1.GenerationService/{method}")()
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await call.details() == "the call has no request"


async def test_client_that_leaves_before_its_answer_logs_no_error(pair, caplog):
    check = pair.channel().unary_unary("/grpc.health.v1.Health/Check")
    count = pair.stub().CountTokens
    unknown = health_pb2.HealthCheckRequest(service="nothing").SerializeToString()
    for delay_s in range(60):
        calls = [
            check(unknown, timeout=delay_s / 20_000),
            count(pb.CountTokensRequest(text="x"), timeout=delay_s / 20_000),
        ]
        await asyncio.gather(*calls, return_exceptions=True)
    await pair.idle()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_only_faults_of_clients_are_kept_out_of_grpcs_log(pair, caplog):
    grpcs = logging.getLogger("grpc._cython.cygrpc")
    not_utf8 = UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "metadata that clients in other languages can send")
    for error in (grpc.aio.InternalError("not delivered"), not_utf8, ValueError("a defect")):
        grpcs.error("raised in core", exc_info=error)
    assert [str(record.exc_info[1]) for record in caplog.records] == ["a defect"]
