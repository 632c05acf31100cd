"""The Attach stream to one engine: connects, monitors the engine's heartbeats, and reconnects until it is stopped.

This module owns the socket: handshake, reading and writing tasks, liveness and backoff. `session.py` handles the
messages, and `router.py` decides what a lost engine means for requests.
"""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from chairlift.service.engine_protocol import PROTOCOL_MAJOR, PROTOCOL_MINOR
from frontend import __version__
from frontend.access.engine_tls import EngineTls
from frontend.engine_address import EngineAddress, EngineKind
from frontend.errors import EngineUnavailable, RequestError, TokenizerMismatch
from frontend.observability.engine_metrics import EngineMetrics
from frontend.routing.cached_blocks import CachedBlocks
from frontend.routing.channel import engine_channel
from frontend.routing.connection_log import ConnectionLog, EngineLostError, EngineNotReadyError
from frontend.routing.foreign.attach import WELCOME_TIMEOUT_S, ForeignAttach, check_installed, make_stub
from frontend.routing.heartbeat import Heartbeat
from frontend.routing.held_adapters import HeldAdapters
from frontend.routing.pending import PendingRequest
from frontend.routing.session import EngineSession
from frontend.routing.tls_probe import tls_problem
from frontend.text.served_model import Adapter, ServedModel
from frontend.text.tokenizer_source import TokenizerSource

if TYPE_CHECKING:
    from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceAsyncStub

logger = logging.getLogger(__name__)

_WELCOME_TIMEOUT_S = 10.0
_MIN_BACKOFF_S = 0.1
_MAX_WAITING_BACKOFF_S = 0.25  # while an engine starts; this delay adds to its start-up time
MAX_BACKOFF_S = 2.0
_HEARTBEAT_CHECKS = 12


class AttachCall(Protocol):
    """The Attach stream, or what stands in for it."""

    async def write(self, request: pb.AttachRequest) -> None:
        """Sends a command."""

    async def read(self) -> object:
        """Returns the next AttachResponse, or something else at the end of the stream."""
        ...

    def cancel(self) -> object:
        """Ends the stream."""
        ...


@dataclass(frozen=True, slots=True)
class Attachment:
    """An attached engine: its model, and the session to submit requests to.

    Attributes:
        engine: the engine's name in metrics.
        model: without adapters.
        adapters: the adapters that the engine has.
        cached_blocks: its prefix cache, if it may report it.
    """

    engine: str
    instance_id: str
    model: ServedModel
    session: EngineSession
    adapters: HeldAdapters
    cached_blocks: CachedBlocks | None = None


class ConnectionEvents(Protocol):
    """The router's interface for connections."""

    @property
    def serving(self) -> bool:
        """Whether any engine serves."""
        ...

    def can_replace(self, attachment: Attachment) -> bool:
        """Whether other engines can take all requests of this one."""
        ...

    def on_changed(self) -> None:
        """Called when an engine's state or model may have changed."""

    def on_attached(self, connection: "EngineConnection", attachment: Attachment) -> None:
        """Called when an engine has attached."""

    def on_adapters(self, before: Mapping[str, Adapter], now: Mapping[str, Adapter]) -> None:
        """Called when the adapters of an engine have changed."""

    def on_lost(
        self, address: str, attachment: Attachment, requests: list[PendingRequest], unsent: list[PendingRequest]
    ) -> None:
        """Called when an engine is lost, with its open requests; `unsent` were never sent to it."""

    def on_rejected(self, instance_id: str, request: PendingRequest, error: RequestError, *, was_taken: bool) -> None:
        """Called when an engine rejected or dropped a request that another one may serve; see `session.OnRejected`."""


class EngineConnection:
    """Keeps this process attached to one engine.

    Args:
        address: HOST:PORT or unix:PATH, with the scheme of another project's engine.
        tokenizers: loads the tokenizer of the engine's model.
        metrics: the engine's metrics.
        heartbeat_timeout_s: time without a message after which the engine is lost; a ping times out a little earlier.
        step_timeout_s: time without an iteration of the step loop after which the engine is lost; 0 disables.
        events: receives events.
        was_found: whether the address comes from DNS; a missing engine is then not logged.
        tls: certificates; None disables TLS, which unix sockets never use.
        server_name: name that the engine's certificate must have, if it differs from the address.
    """

    def __init__(
        self,
        address: str,
        tokenizers: TokenizerSource,
        metrics: EngineMetrics,
        *,
        heartbeat_timeout_s: float,
        step_timeout_s: float,
        events: ConnectionEvents,
        was_found: bool = False,
        tls: EngineTls | None = None,
        server_name: str | None = None,
    ) -> None:
        self.address = address
        self._kind, self._target = EngineAddress.parse(address)
        check_installed(self._kind)
        self._is_remote = not self._target.startswith("unix:")
        self._tls = tls if self._is_remote else None
        self._server_name = server_name.rstrip(".") if server_name else None
        self._tokenizers = tokenizers
        self.metrics = metrics
        self._events = events
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._step_timeout_s = step_timeout_s
        self._hung: tuple[str, int] | None = None  # an instance that was dropped because it hangs, and its loop turns
        self._frontend_id = uuid.uuid4().hex
        self._attachment: Attachment | None = None
        self._stub: EngineServiceAsyncStub | None = None  # while it is attached
        self._engine_state = pb.ENGINE_STATE_UNSPECIFIED
        self._log = ConnectionLog(logger, address, was_found=was_found)
        self._num_messages = 0
        self._has_commands = asyncio.Event()
        self._stop_error: RequestError | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def serving(self) -> bool:
        """Whether the engine accepts requests."""
        return self._attachment is not None and self._engine_state == pb.ENGINE_STATE_SERVING

    @property
    def attachment(self) -> Attachment | None:
        """The attached engine, whether or not it accepts requests; None if none is attached."""
        return self._attachment

    @property
    def state(self) -> str:
        """The engine's state in one word, for example "draining"."""
        return pb.EngineState.Name(self._engine_state).removeprefix("ENGINE_STATE_").lower()

    @property
    def num_open(self) -> int:
        """Number of this frontend's open requests in the engine."""
        return self._attachment.session.num_open if self._attachment is not None else 0

    def start(self) -> None:
        """Starts connecting in the background. May be called again."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine-connection")

    async def stop(self, error: RequestError) -> None:
        """Ends the stream; open requests fail with `error`. May be called again."""
        if self._task is not None:
            self._stop_error = error
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def stub(self) -> "EngineServiceAsyncStub | None":
        """The attached engine's other calls; None if none is attached."""
        return self._stub

    async def _run(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        max_backoff_s = _MAX_WAITING_BACKOFF_S
        while True:
            try:
                await self._attach()
            except Exception as error:  # even a defect: the next attempt may succeed
                self._log.note(error, was_attached=self._attachment is not None)
                if isinstance(error, EngineNotReadyError):
                    max_backoff_s = _MAX_WAITING_BACKOFF_S
                elif isinstance(error, TokenizerMismatch):  # an operator must act
                    max_backoff_s = MAX_BACKOFF_S
            finally:
                was_attached = self._attachment is not None
                self._detach()
            if was_attached:
                backoff_s, max_backoff_s = _MIN_BACKOFF_S, MAX_BACKOFF_S
            else:
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S if self._events.serving else max_backoff_s)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    def _detach(self) -> None:
        attachment, self._attachment, self._stub = self._attachment, None, None
        self._engine_state = pb.ENGINE_STATE_UNSPECIFIED
        if attachment is None:
            return
        self.metrics.detach()
        error = self._stop_error or _gone()
        requests, unsent = attachment.session.end(error)
        if self._stop_error is not None:
            for request in (*requests, *unsent):
                request.stream.fail(self._stop_error)
            requests, unsent = [], []
        if requests:
            self.metrics.count_lost(len(requests))
        self._events.on_changed()
        self._events.on_lost(self.address, attachment, requests, unsent)

    def _on_rejected(self, instance_id: str, request: PendingRequest, error: RequestError, *, was_taken: bool) -> None:
        if was_taken:
            self.metrics.count_lost(1)
        self._events.on_rejected(instance_id, request, error, was_taken=was_taken)

    async def _attach(self) -> None:
        async with self._channel() as channel:
            stub = self._make_stub(channel)
            call: AttachCall = stub.Attach()
            try:
                welcome = await self._hello(channel, call)
                instance_id = welcome.engine_instance_id
                if (instance_id, welcome.status.loop_turns) == self._hung:
                    raise EngineNotReadyError("its step loop is still stuck")
                model = await self._served_model(stub, welcome.info)
                session = EngineSession(
                    vocab_size=model.vocab_size,
                    block_size=welcome.info.block_size,
                    step_window=welcome.step_window,
                    wake=self._has_commands.set,
                    on_rejected=partial(self._on_rejected, instance_id),
                )
                adapters = HeldAdapters(list(welcome.info.adapters), welcome.status)
                if welcome.status.HasField("load"):
                    session.note_load(welcome.status.load)
                blocks = call.cached_blocks if isinstance(call, ForeignAttach) else None
                self._attachment = Attachment(self.metrics.engine, instance_id, model, session, adapters, blocks)
                self._stub = stub
                self.metrics.attach(welcome, has_counters=self._kind is EngineKind.CHAIRLIFT)
                self._log.clear()
                logger.info(
                    "engine %s attached: instance %s, model %s, max_model_len %d",
                    self.address,
                    instance_id,
                    model.name,
                    model.max_model_len,
                )
                self._events.on_attached(self, self._attachment)
                self._note_state(welcome.status)
                heartbeat = Heartbeat(
                    timeout_s=self._step_timeout_s, num_turns=welcome.status.loop_turns, now_s=time.monotonic()
                )
                await _until_first_fails(
                    self._read(call, session, heartbeat), self._write(call, session), self._watch_silence()
                )
            finally:
                call.cancel()

    def _make_stub(self, channel: grpc.aio.Channel) -> "EngineServiceAsyncStub":
        if self._kind is EngineKind.CHAIRLIFT:
            return EngineServiceStub(channel)
        return cast("EngineServiceAsyncStub", make_stub(self._kind, channel, self.address, self._tokenizers.own_files))

    def _channel(self) -> grpc.aio.Channel:
        return engine_channel(
            EngineAddress(self._kind, self._target),
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            tls=self._tls,
            server_name=self._server_name,
        )

    async def _hello(self, channel: grpc.aio.Channel, call: AttachCall) -> pb.Welcome:
        hello = pb.Hello(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            frontend_id=self._frontend_id,
            frontend_version=__version__,
            tokenizer_sha256=self._tokenizers.own_sha256,
        )
        timeout_s = _WELCOME_TIMEOUT_S if self._kind is EngineKind.CHAIRLIFT else WELCOME_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(pb.AttachRequest(command_seq=1, hello=hello))
                response = await call.read()
        except TimeoutError as error:
            raise EngineLostError(f"no welcome within {timeout_s:g} s") from error
        except grpc.aio.AioRpcError as error:
            # Without an engine the status is the same, but the channel is not connected.
            if error.code() is grpc.StatusCode.UNAVAILABLE and channel.get_state() is grpc.ChannelConnectivity.READY:
                raise EngineNotReadyError(error.details()) from error
            if self._is_remote and _may_be_tls(error.details() or ""):
                context = self._tls.context() if self._tls is not None else None
                if (problem := await tls_problem(self._target, context, self._server_name)) is not None:
                    raise EngineLostError(problem) from error
            raise
        if not isinstance(response, pb.AttachResponse) or response.WhichOneof("event") != "welcome":
            raise EngineLostError("the engine's first message is not a welcome")
        return response.welcome

    async def _served_model(self, stub: "EngineServiceAsyncStub", info: pb.EngineInfo) -> ServedModel:
        tokenizer, defaults = await self._tokenizers.get(stub, info.tokenizer_sha256)
        if tokenizer.vocab_size > info.vocab_size:
            logger.warning("the tokenizer has %d tokens, the model only %d", tokenizer.vocab_size, info.vocab_size)
        return ServedModel(
            name=info.model,
            weights_revision=info.weights_revision,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            end_token_ids=tuple(info.end_token_ids),
            max_logprobs=info.max_logprobs,
            tokenizer=tokenizer,
            defaults=defaults,
            aliases=tuple(info.aliases),
        )

    async def _read(self, call: AttachCall, session: EngineSession, heartbeat: Heartbeat) -> None:
        while True:
            response = await call.read()
            if not isinstance(response, pb.AttachResponse):
                raise EngineLostError("the engine closed the stream")
            self._num_messages += 1
            match response.WhichOneof("event"):
                case "step":
                    session.on_step(response.step)
                    self.metrics.note_step(response.step)
                    if response.step.HasField("load"):
                        session.note_load(response.step.load)
                case "admission":
                    session.on_admission(response.admission)
                case "status":
                    self.metrics.note_status(response.status)
                    if response.status.HasField("load"):
                        session.note_load(response.status.load)
                    self._note_adapters(response.status)
                    self._note_state(response.status)
                    self._note_heartbeat(response.status, heartbeat)
                case "drain":
                    logger.warning("engine %s drains and stops in %d s", self.address, response.drain.grace.seconds)
                    self._note_state(pb.EngineStatus(state=pb.ENGINE_STATE_DRAINING))
                case other:
                    logger.debug("engine %s sent %s, which this version does not know", self.address, other)

    async def _write(self, call: AttachCall, session: EngineSession) -> None:
        while True:
            await self._has_commands.wait()
            self._has_commands.clear()
            for command in session.take_commands():
                try:
                    await call.write(command)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                    raise EngineLostError("the stream was aborted") from error

    async def _watch_silence(self) -> None:
        """Raises EngineLostError when no message has come for the heartbeat timeout."""
        # Counts checks instead of seconds, so that a delay of this process does not look like silence. The last message
        # may have come a whole interval before the check that first saw it, hence one check less.
        num_seen, num_silent = self._num_messages, 0
        while num_silent < _HEARTBEAT_CHECKS - 1:
            await asyncio.sleep(self._heartbeat_timeout_s / _HEARTBEAT_CHECKS)
            num_silent = num_silent + 1 if self._num_messages == num_seen else 0
            num_seen = self._num_messages
        raise EngineLostError(f"no message for {self._heartbeat_timeout_s:g} s")

    def _note_state(self, status: pb.EngineStatus) -> None:
        if status.state != self._engine_state:
            self._engine_state = status.state
            detail = f": {status.detail}" if status.detail else ""
            if status.state == pb.ENGINE_STATE_FAILED:
                # It ends now; what it reports about requests afterwards is not valid.
                raise EngineLostError(f"the engine has failed{detail}")
            logger.info("engine %s is %s%s", self.address, self.state, detail)
            if status.state == pb.ENGINE_STATE_DRAINING and self._attachment is not None:
                self._attachment.session.acknowledge_at_once()
            self._events.on_changed()

    def _note_adapters(self, status: pb.EngineStatus) -> None:
        if self._attachment is not None and status.HasField("adapters"):
            adapters = self._attachment.adapters
            before = adapters.by_name
            if adapters.update(status.adapters):
                self._events.on_adapters(before, adapters.by_name)

    def _note_heartbeat(self, status: pb.EngineStatus, heartbeat: Heartbeat) -> None:
        now_s = time.monotonic()
        heartbeat.note(status.loop_turns, now_s)
        attachment = self._attachment
        assert attachment is not None, "its stream is being read"
        if heartbeat.has_stopped(now_s):
            reason = f"its step loop has been stuck for {self._step_timeout_s:g} s"
        elif status.is_stalled and self._events.can_replace(attachment):
            reason = "its step makes no progress"  # if others cannot take its requests, it is better to wait
        else:
            return
        self._hung = (attachment.instance_id, heartbeat.num_turns)
        raise EngineLostError(reason)


def _gone() -> EngineUnavailable:
    return EngineUnavailable("the engine went away", retry_after_s=MAX_BACKOFF_S)


def _may_be_tls(details: str) -> bool:
    """Returns whether the connection was opened and then closed by the peer."""
    return "Socket closed" in details or "handshake" in details


async def _until_first_fails(*coroutines: Coroutine[object, object, None]) -> None:
    """Runs coroutines until one raises, cancels the others, and raises that error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:  # the first error in this order is raised
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
