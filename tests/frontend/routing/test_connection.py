"""Connection to an engine that is absent, loading, lost, hung, restarted or replaced."""

import asyncio
import logging

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.service.engine_protocol import PROTOCOL_MINOR
from chairlift.v1 import generation_service_pb2 as pb
from frontend.routing.connection_log import EngineLostError
from tests.hang import HANG_S
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.calls import failure
from tests.support.frontend.fake_engine import FakeEngine, rejection


def details(error):
    """Returns the reason of ErrorInfo, and the seconds of RetryInfo or None."""
    status = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    info, retry, retry_s = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), None
    for detail in rpc_status.status_pb2.Status.FromString(status[0]).details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_s = retry.retry_delay.ToTimedelta().total_seconds()
    return info.reason, retry_s


async def test_connects_when_an_absent_engine_starts(make_pair, text_request, engine_address):
    engine = FakeEngine(address=engine_address)
    pair = await make_pair(engine=Absent(engine), wait=False)
    stub = pair.stub()
    error = await failure(stub.StreamGenerate(text_request("abc")))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    reason, retry_s = details(error)
    assert reason == "ENGINE_UNAVAILABLE"
    assert retry_s > 0
    assert ("grpc-retry-pushback-ms", str(int(retry_s * 1000))) in tuple(error.trailing_metadata())
    for call in (stub.GetModel(pb.GetModelRequest()), stub.CountTokens(pb.CountTokensRequest(text="a"))):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(TimeoutError):
        await pair.app.wait_serving(0.01)
    pair.engine = engine
    await engine.start()
    await pair.app.wait_serving(HANG_S)
    assert (await stub.Generate(pb.GenerateRequest(spec=text_request("abc").spec))).text == "abc"


class Absent:
    """Reserves an engine's address without an engine."""

    def __init__(self, engine):
        self._engine = engine

    async def start(self):
        return self._engine.address

    async def kill(self):
        pass


@pytest.fixture
def engine_address(tmp_path):
    return f"unix:{tmp_path}/engine.sock"


async def test_requests_are_refused_while_the_engine_loads(make_pair, text_request):
    pair = await make_pair(engine=FakeEngine(state=engine_pb.ENGINE_STATE_LOADING), wait=False)
    await pair.engine.wait_for(lambda: pair.engine.num_sessions == 1)
    error = await failure(pair.stub().StreamGenerate(text_request("abc")))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_dead_engine_ends_all_streams_at_once_without_a_failover_timeout(make_pair, text_request):
    pair = await make_pair(failover_timeout_s=0, heartbeat_timeout_s=600.0)
    pair.engine.pause()
    stub = pair.stub()
    calls = [asyncio.create_task(failure(stub.StreamGenerate(text_request(str(n))))) for n in range(100)]
    await pair.engine.wait_for(lambda: pair.engine.num_open == 100)
    await pair.engine.kill()
    errors = await asyncio.gather(*calls)
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert {details(error)[0] for error in errors} == {"ENGINE_UNAVAILABLE"}
    await pair.app.calls.wait_idle()
    assert pair.app.admission.num_requests == 0


HEARTBEAT_TIMEOUT_S = 40.0
CHECK_S = HEARTBEAT_TIMEOUT_S / 12


async def test_silent_engine_is_lost(skip, make_pair, text_request, caplog):
    pair = await make_pair(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, failover_timeout_s=0)
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abc"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    pair.engine.stall()

    async def one_check():
        skip(CHECK_S)
        for _ in range(5):  # turns of the loop, for its timers
            await asyncio.sleep(0)

    (connection,) = pair.app.engines._connections.values()
    watch = asyncio.create_task(connection._watch_silence())  # ends before the connection's own task closes the stream
    await asyncio.sleep(0)
    num_seen, num_silent_checks = connection._num_messages, 0
    while not watch.done():
        await one_check()
        num_silent_checks = num_silent_checks + 1 if connection._num_messages == num_seen else 0
        num_seen = connection._num_messages
    assert 10 < num_silent_checks <= 12
    while "lost the engine" not in caplog.text:
        await one_check()
    assert "no message for 40 s" in caplog.text
    assert isinstance(watch.exception(), EngineLostError)
    assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE


async def test_heartbeats_alone_keep_a_slow_engine(skip, make_pair, text_request, caplog):
    pair = await make_pair(heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    (client,) = pair.app.engines._connections.values()
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abc"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    for _ in range(12):
        num_messages = client._num_messages
        skip(CHECK_S)
        while client._num_messages == num_messages:
            await asyncio.sleep(0)
    assert "lost the engine" not in caplog.text
    pair.engine.resume()
    assert [message async for message in call][-1].HasField("finished")


async def test_restarted_engine_is_attached_as_a_new_instance(make_pair, text_request, engine_address):
    pair = await make_pair(engine=FakeEngine(address=engine_address))
    instance = pair.app.engines.attachment().instance_id
    await pair.engine.kill()
    while pair.app.engines.serving:
        await asyncio.sleep(0)
    pair.engine = FakeEngine(address=engine_address)
    await pair.engine.start()
    await pair.app.wait_serving(HANG_S)
    assert pair.app.engines.attachment().instance_id != instance
    assert (await pair.stub().Generate(pb.GenerateRequest(spec=text_request("new").spec))).text == "new"
    assert pair.engine.num_tokenizer_fetches == 0  # the same files: nothing to fetch


async def test_changed_tokenizer_is_fetched_again(make_pair, text_request, engine_address):
    pair = await make_pair(engine=FakeEngine(address=engine_address))
    assert (await pair.stub().GetModel(pb.GetModelRequest())).has_chat_template
    await pair.engine.kill()
    while pair.app.engines.serving:
        await asyncio.sleep(0)
    files = {"tokenizer.json": byte_tokenizer_files()["tokenizer.json"]}
    pair.engine = FakeEngine(address=engine_address, files=files)
    await pair.engine.start()
    await pair.app.wait_serving(HANG_S)
    assert not (await pair.stub().GetModel(pb.GetModelRequest())).has_chat_template


REJECTIONS = {
    engine_pb.REJECTION_REASON_QUEUE_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 7.0),
    engine_pb.REJECTION_REASON_TOO_LONG: (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_LONG", None),
    engine_pb.REJECTION_REASON_DRAINING: (grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE", 7.0),
    engine_pb.REJECTION_REASON_INVALID: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", None),
    engine_pb.REJECTION_REASON_UNSPECIFIED: (grpc.StatusCode.INTERNAL, "ENGINE_FAULT", None),
}


@pytest.mark.parametrize("why", REJECTIONS, ids=engine_pb.RejectionReason.Name)
async def test_rejection_reaches_the_client_as_its_status(make_pair, text_request, why):
    pair = await make_pair(failover_timeout_s=0)
    pair.engine.rejections = [rejection(why, "the numbers", retry_after_s=7) for _ in range(2)]
    error = await failure(pair.stub().StreamGenerate(text_request("abc")))
    code, reason, retry_after_s = REJECTIONS[why]
    told, told_s = details(error)
    assert (error.code(), told) == (code, reason)
    assert told_s is None if retry_after_s is None else retry_after_s <= told_s < 2 * retry_after_s
    assert "the numbers" in error.details()


async def test_steps_are_acknowledged_in_time(make_pair, text_request):
    pair = await make_pair(engine=FakeEngine(step_window=1))
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=text_request("a" * 50).spec))
    assert answer.text == "a" * 50


async def test_hello_identifies_the_frontend(pair):
    (hello,) = pair.engine.hellos
    assert (hello.protocol_major, hello.protocol_minor, hello.tokenizer_sha256) == (1, PROTOCOL_MINOR, b"")
    assert len(hello.frontend_id) == 32


async def test_engine_is_refused_if_the_configured_tokenizer_is_another_models(
    make_pair, tmp_path, engine_address, caplog
):
    files = byte_tokenizer_files()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    pair = await make_pair(engine=FakeEngine(address=engine_address), tokenizer=tmp_path)
    assert pair.engine.num_tokenizer_fetches == 0  # the same model: its own files are enough
    await pair.engine.kill()
    other = FakeEngine(address=engine_address, files={"tokenizer.json": files["tokenizer.json"]})
    with caplog.at_level(logging.WARNING):
        await other.start()
        await other.wait_for(lambda: len(other.hellos) >= 2)  # refused, and tried again
    pair.engine = other
    assert not pair.app.engines.serving
    assert "FAILED_PRECONDITION" in caplog.text


class LoadingEngine(FakeEngine):
    """Refuses to attach frontends while it loads, and reports its progress, like the real engine."""

    loading = True
    detail = ""

    async def Attach(self, request_iterator, context):
        if self.loading:
            self.hellos.append((await anext(request_iterator)).hello)
            self._notify()
            detail = self.detail or f"loading weights {len(self.hellos)} %"
            await context.abort(grpc.StatusCode.UNAVAILABLE, detail)
        async for response in super().Attach(request_iterator, context):
            yield response


async def test_progress_of_a_loading_engine_is_logged_at_intervals(make_pair, caplog, monkeypatch):
    """A message that came too early for a line is logged later."""
    monkeypatch.setattr("frontend.routing.connection.random.uniform", lambda low, high: 0.01)
    monkeypatch.setattr("frontend.routing.connection_log._PROGRESS_LOG_S", 1000.0)
    engine = LoadingEngine()

    def said(words):
        return [record for record in caplog.records if words in record.message]

    with caplog.at_level(logging.INFO, "frontend.routing.connection"):
        await make_pair(engine=engine, wait=False)
        await engine.wait_for(lambda: engine.hellos)
        engine.detail = "compiling CPU kernels, 3 of 47"
        await engine.wait_for(lambda: len(engine.hellos) >= 5)
        assert said("loading weights 1 %")
        assert not said("3 of 47")
        monkeypatch.setattr("frontend.routing.connection_log._PROGRESS_LOG_S", 0.0)
        async with asyncio.timeout(HANG_S):
            while not said("3 of 47"):
                await asyncio.sleep(0.001)
        num_hellos = len(engine.hellos)
        await engine.wait_for(lambda: len(engine.hellos) >= num_hellos + 3)
    assert len(said("3 of 47")) == 1


async def test_backoff_stays_short_while_the_first_engine_loads(make_pair, monkeypatch):
    pauses = []
    sleep = asyncio.sleep

    async def short_sleep(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("frontend.routing.connection.random.uniform", lambda low, high: high)
    pair = await make_pair(engine=LoadingEngine(), wait=False, log_stats_interval_s=0.0)  # so that it does not sleep
    monkeypatch.setattr("frontend.routing.connection.asyncio.sleep", short_sleep)
    num_hellos = len(pair.engine.hellos)
    await pair.engine.wait_for(lambda: len(pair.engine.hellos) >= num_hellos + 6)
    assert max(pauses) == 0.25


async def test_defect_while_connecting_is_logged_once_with_its_traceback(make_pair, caplog, monkeypatch):
    attempts = []

    def broken(*args):
        attempts.append(args)
        raise KeyError("template")

    monkeypatch.setattr("frontend.text.tokenizer_source.Tokenizer", broken)
    monkeypatch.setattr("frontend.routing.connection.random.uniform", lambda low, high: 0.01)
    pair = await make_pair(wait=False)
    while len(attempts) < 3:
        await asyncio.sleep(0.01)
    errors = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.exc_info is not None for record in errors] == [True]
    assert not pair.app.engines.serving


async def test_write_on_an_ended_stream_is_a_lost_engine_and_not_a_defect(make_pair, caplog, monkeypatch):
    async def finished(self, request):
        raise asyncio.InvalidStateError("RPC already finished.")

    pair = await make_pair()
    monkeypatch.setattr("grpc.aio._call.StreamStreamCall.write", finished)
    pair.session._outbox.submit(engine_pb.Submission(handle=7))
    while pair.app.engines.serving:
        await asyncio.sleep(0)
    monkeypatch.undo()
    await pair.app.wait_serving(HANG_S)
    lost = [record for record in caplog.records if "the stream was aborted" in record.message]
    assert [(record.levelno, record.exc_info) for record in lost] == [(logging.WARNING, None)]


async def test_http_proxy_of_the_environment_is_ignored(make_pair, monkeypatch):
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    assert (await make_pair()).app.engines.serving
