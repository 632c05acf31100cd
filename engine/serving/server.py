"""The gRPC service of an engine: passes commands from streams to the step loop and its reports back to the streams.

One object serves for the life of the process. It answers GetEngineStatus at once, refuses Attach while the engine
loads, and passes every report to the session that owns the request. All of it runs on the IO thread.
"""

# ruff: noqa: N802, ARG002 - method names and arguments are defined by the service

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import grpc
import grpc.aio
from google.protobuf.duration import from_nanoseconds
from google.protobuf.message import DecodeError

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceServicer
from chairlift.service.end_reason import EndReason
from chairlift.service.engine_protocol import PROTOCOL_MAJOR, PROTOCOL_MINOR
from chairlift.service.health import Health
from engine.core.adapter_slots import AdapterSlots
from engine.core.cache_events import CacheEvent
from engine.core.request import RequestId
from engine.errors import EngineDraining
from engine.interfaces import (
    AdmissionReport,
    CacheReport,
    DrainReport,
    EngineState,
    FencePassed,
    Inbox,
    LoopSnapshot,
    Report,
    StepReport,
)
from engine.serving.adapters import EngineAdapters
from engine.serving.client_errors import CallRefused
from engine.serving.convert import RequestLimits
from engine.serving.outgoing import STEP_WINDOW, Outgoing, Receiver
from engine.serving.packing import status_message
from engine.serving.parts import EngineParts
from engine.serving.session import Session, SessionContext
from engine.serving.stall import StallMeter
from engine.serving.throughput_log import ThroughputLog

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["EngineService"].full_name
HEARTBEAT_S = 0.25
HELLO_TIMEOUT_S = 10.0
TOKENIZER_CHUNK_BYTES = 1 << 20

_log = logging.getLogger(__name__)

if TYPE_CHECKING:  # generic in the stubs only
    _AttachContext = grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse]
    _LoadAdapterContext = grpc.aio.ServicerContext[pb.LoadAdapterRequest, pb.LoadAdapterResponse]
    _UnloadAdapterContext = grpc.aio.ServicerContext[pb.UnloadAdapterRequest, pb.UnloadAdapterResponse]
    _TokenizerContext = grpc.aio.ServicerContext[pb.GetTokenizerRequest, pb.GetTokenizerResponse]


class EngineService(EngineServiceServicer):
    """The engine's side of the wire.

    Attributes:
        health: serving status for grpc.health.v1.

    Invariant: `_owners` holds exactly the open requests of all sessions. Reports about other requests belong to streams
    that have ended, and are dropped.
    """

    def __init__(
        self,
        log_stats_interval_s: float = 0.0,
        *,
        other_services: Sequence[str] = (),
        on_cache_events: Callable[[Sequence[CacheEvent]], None] = lambda _: None,
    ) -> None:
        """Creates the service in the state LOADING.

        Args:
            log_stats_interval_s: seconds between throughput lines; 0 disables them.
            other_services: full names of further services of the same engine, for its health.
            on_cache_events: called with what enters and leaves the prefix cache, if the scheduler records it.
        """
        self._on_cache_events = on_cache_events
        self._log_stats_interval_s = log_stats_interval_s
        self.instance_id = uuid.uuid4().hex
        self.health = Health(SERVICE_NAME, *other_services, process_status_follows=True)
        self._state = EngineState.LOADING
        self._detail = "starting"
        self._stall_meter = StallMeter(HEARTBEAT_S)
        self._is_stalled = False
        self._parts: EngineParts | None = None
        self._snapshot: Callable[[], LoopSnapshot] | None = None
        self._context: SessionContext | None = None
        self._adapters: EngineAdapters | None = None
        self._owners: dict[RequestId, Session] = {}
        self._sessions: dict[str, Session] = {}
        self._session_numbers = itertools.count(1)

    @property
    def state(self) -> EngineState:
        """State of the engine."""
        return self._state

    @property
    def detail(self) -> str:
        """Why it does not serve, for people."""
        return self._detail or self._state.name.lower()

    def loaded_parts(self) -> EngineParts:
        """Returns what the engine serves with. Scheduler and runner belong to the step loop's thread.

        Raises: CallRefused: it loads.
        """
        if self._parts is None:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, self.detail)
        return self._parts

    def serving_parts(self) -> EngineParts:
        """Returns the parts of an engine that takes requests.

        Raises: EngineDraining: it does not.
        """
        if self._parts is None or self._state is not EngineState.SERVING:
            raise EngineDraining(self.detail)
        return self._parts

    def snapshot(self) -> LoopSnapshot:
        """Returns the newest state of the step loop of an engine that has loaded."""
        assert self._snapshot is not None, "a snapshot before set_serving"
        return self._snapshot()

    def open_session(self, outgoing: Receiver, last_command_seq: int = 0) -> Session:
        """Opens a session of an engine that serves. It lasts as long as the engine, or until `abandon` and removal.

        Args:
            outgoing: gets what becomes of its requests.
            last_command_seq: of the commands so far.
        """
        assert self._context is not None, "a session before set_serving"
        number = next(self._session_numbers)
        session = Session(f"{self.instance_id[:8]}-{number}", self._context, outgoing, last_command_seq, number)
        self._sessions[session.session_id] = session
        return session

    def set_loading(self, detail: str) -> None:
        """Sets the loading progress, such as "loading weights 43 %"."""
        self._detail = detail

    def set_serving(self, parts: EngineParts, inbox: Inbox, snapshot: Callable[[], LoopSnapshot]) -> None:
        """Accepts streams from now on.

        Args:
            parts: of the engine.
            inbox: takes commands to the step loop.
            snapshot: returns the newest state of the step loop; called on the IO thread.
        """
        self._parts, self._snapshot = parts, snapshot
        initial = [(adapter.name, adapter.sha256) for adapter in parts.info.adapters]
        slots = AdapterSlots(parts.num_adapter_slots or len(initial), initial)
        names = (parts.info.model, *parts.info.aliases)
        self._adapters = EngineAdapters(names, slots, inbox, parts.load_adapter, self._send_status)
        self._context = SessionContext(
            inbox,
            RequestLimits.of(parts.info),
            parts.max_open_requests,
            itertools.count(1),
            self._owners,
            parts.grammars,
            self._sessions,
            self._adapters,
        )
        self._set_state(EngineState.SERVING, "")

    def fail(self, detail: str) -> None:
        """Ends every open request with ENGINE_ERROR after a step failed; `finish` then ends the streams."""
        self._set_state(EngineState.FAILED, detail)
        for session in self._sessions.values():
            session.end_all(EndReason.ENGINE_ERROR, detail)

    def finish(self, detail: str) -> None:
        """Cancels the open requests and ends every stream once its messages are sent; the step loop has ended."""
        if self._state is not EngineState.FAILED:
            self._set_state(EngineState.DRAINING, detail)
        self.health.close()
        if self._adapters is not None:
            self._adapters.close()
        for session in self._sessions.values():
            session.end_all(EndReason.CANCELLED, detail)
            session.close()

    def deliver(self, report: Report) -> None:
        """Passes a report of the step loop to the sessions it concerns."""
        match report:
            case StepReport():
                self._deliver_step(report)
            case AdmissionReport():
                for request_id in report.accepted:
                    if (session := self._owners.get(request_id)) is not None:
                        session.accept(request_id)
                for request_id, error in report.rejected:
                    if (session := self._owners.get(request_id)) is not None:
                        session.reject(request_id, error)
            case CacheReport():
                self._on_cache_events(report.events)
            case FencePassed():
                assert self._adapters is not None, "it asked for the fence"
                self._adapters.pass_fence(report.number)
            case DrainReport():
                self._set_state(EngineState.DRAINING, f"draining for at most {report.grace_s:g} s")
                for session in self._sessions.values():
                    session.outgoing.announce_drain(pb.DrainNotice(grace=from_nanoseconds(round(report.grace_s * 1e9))))

    async def send_heartbeats(self) -> None:
        """Sends a status to every session each HEARTBEAT_S and logs throughput; runs until cancelled."""
        throughput = ThroughputLog(self._log_stats_interval_s)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._parts is not None and self._log_stats_interval_s:
                throughput.tick(self.snapshot(), time.monotonic())
            if self._parts is not None and self._parts.progress is not None:
                mark = self.snapshot().loop_turns, self._parts.progress()
                self._is_stalled = self._stall_meter.observe(mark)
            self._send_status()

    async def Attach(  # type: ignore[override]  # no generator: `finally` must run when the call is cancelled
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: "_AttachContext"
    ) -> None:
        """See the proto."""
        outgoing = Outgoing()
        try:
            session, welcome = await self._open_session(context, outgoing)
        except CallRefused as refusal:
            is_early = refusal.code is grpc.StatusCode.UNAVAILABLE  # frontends retry until the engine has loaded
            _log.log(logging.DEBUG if is_early else logging.WARNING, "Refused a stream: %s", refusal.detail)
            raise
        reader = asyncio.create_task(self._read_commands(session, outgoing, context))
        try:
            await context.write(pb.AttachResponse(welcome=welcome))
            while (message := await outgoing.next_message()) is not None:
                await context.write(message)
        except CallRefused as refusal:
            _log.warning("Session %s ended with an error: %s", session.session_id, refusal.detail)
            raise
        finally:
            reader.cancel()
            del self._sessions[session.session_id]
            num_cancelled = session.abandon()
            _log.info("Session %s ended, %d requests cancelled", session.session_id, num_cancelled)

    async def GetEngineStatus(self, request: pb.GetEngineStatusRequest, context: object) -> pb.GetEngineStatusResponse:
        """See the proto."""
        response = pb.GetEngineStatusResponse(status=self._status(), engine_instance_id=self.instance_id)
        if self._parts is not None:
            response.info.CopyFrom(self._info())
        return response

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: "_TokenizerContext"
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """See the proto."""
        for name, data in self.loaded_parts().tokenizer.files:
            for start in range(0, max(len(data), 1), TOKENIZER_CHUNK_BYTES):
                yield pb.GetTokenizerResponse(file_name=name, data=data[start : start + TOKENIZER_CHUNK_BYTES])

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: "_LoadAdapterContext"
    ) -> pb.LoadAdapterResponse:
        """See the proto."""
        return await self._changing_adapters().load(request)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: "_UnloadAdapterContext"
    ) -> pb.UnloadAdapterResponse:
        """See the proto."""
        return await self._changing_adapters().unload(request)

    def _changing_adapters(self) -> EngineAdapters:
        self.serving_parts()
        assert self._adapters is not None, "set together"
        return self._adapters

    def _info(self) -> pb.EngineInfo:
        """Returns the engine's info, with the adapters that it has now."""
        assert self._parts is not None, "it serves, or has served"
        assert self._adapters is not None, "set together"
        listed = self._adapters.listed()
        if listed is None:
            return self._parts.info
        info = pb.EngineInfo()
        info.CopyFrom(self._parts.info)
        del info.adapters[:]
        info.adapters.extend(listed.adapters)
        return info

    async def _open_session(self, context: "_AttachContext", outgoing: Outgoing) -> tuple[Session, pb.Welcome]:
        """Checks Hello and registers the session; the caller sends Welcome before any other message."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, f"no hello within {HELLO_TIMEOUT_S:g} s") from None
        if not isinstance(first, pb.AttachRequest) or first.WhichOneof("command") != "hello":
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, "the first message of the stream must be hello")
        if self._parts is None or self._context is None or self._state is not EngineState.SERVING:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, self.detail)
        hello = first.hello
        self._check_hello(hello, self._parts.info)
        session = self.open_session(outgoing, first.command_seq)
        session_id = session.session_id
        welcome = pb.Welcome(
            protocol_minor=min(PROTOCOL_MINOR, hello.protocol_minor),
            engine_instance_id=self.instance_id,
            session_id=session_id,
            info=self._info(),
            step_window=STEP_WINDOW,
            status=self._status(),
        )
        _log.info("Session %s: frontend %r version %r", session_id, hello.frontend_id[:64], hello.frontend_version[:64])
        return session, welcome

    def _check_hello(self, hello: pb.Hello, info: pb.EngineInfo) -> None:
        if hello.protocol_major != PROTOCOL_MAJOR:
            _refuse_hello(f"protocol_major is {hello.protocol_major}, this engine has {PROTOCOL_MAJOR}")
        if hello.tokenizer_sha256 and hello.tokenizer_sha256 != info.tokenizer_sha256:
            given, own = hello.tokenizer_sha256.hex()[:16], info.tokenizer_sha256.hex()[:16]
            _refuse_hello(f"tokenizer_sha256 is {given}..., this engine's tokenizer is {own}...: not the same model")

    async def _read_commands(self, session: Session, outgoing: Outgoing, context: "_AttachContext") -> None:
        """Passes commands to the session until the frontend closes its side, which ends the session."""
        try:
            while isinstance(message := await context.read(), pb.AttachRequest):
                session.handle(message)
                await session.wait_for_capacity()
            outgoing.close(linger_s=0)
        except CallRefused as refusal:
            outgoing.refuse(refusal)
        except DecodeError:
            detail = "a message of the stream cannot be parsed"
            outgoing.refuse(CallRefused(grpc.StatusCode.INVALID_ARGUMENT, detail))
        except Exception:
            _log.exception("Session %s: internal error while reading commands", session.session_id)
            outgoing.refuse(CallRefused(grpc.StatusCode.INTERNAL, "internal error, see the engine's log"))

    def _deliver_step(self, report: StepReport) -> None:
        for output in report.outputs:
            if (session := self._owners.get(output.request_id)) is not None:
                session.add_output(output, report.snapshot, report.sampled_at_ns)
        for session in self._sessions.values():
            session.outgoing.end_step()

    def _set_state(self, state: EngineState, detail: str) -> None:
        self._state, self._detail = state, detail
        self.health.set_serving(state is EngineState.SERVING)
        self._send_status()

    def _send_status(self) -> None:
        if self._sessions:
            status = self._status()
            for session in self._sessions.values():
                session.outgoing.set_status(status)

    def _status(self) -> pb.EngineStatus:
        snapshot = self._snapshot() if self._snapshot is not None else None
        adapters = self._adapters.listed() if self._adapters is not None else None
        return status_message(self._state, self._detail, snapshot, is_stalled=self._is_stalled, adapters=adapters)


def _refuse_hello(detail: str) -> NoReturn:
    raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, detail)
