"""The one Attach stream of this process: connects, keeps watch, and connects again for ever.

What happens on the stream is `session.py`'s; here is the socket: Hello and Welcome, the reading and the writing task,
the heartbeat, the back-off. An engine that cannot be reached is a state, not an error: requests are refused meanwhile
and health says NOT_SERVING.
"""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from frontend import __version__
from frontend.engine_link.session import EngineSession, ProtocolViolation
from frontend.errors import EngineUnavailable, RequestError, TokenizerMismatch
from frontend.metrics.engine_metrics import EngineMetrics
from frontend.model.served_model import ServedModel
from frontend.model.tokenizer_source import TokenizerSource

if TYPE_CHECKING:
    from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceAsyncStub

logger = logging.getLogger(__name__)

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

_WELCOME_TIMEOUT_S = 10.0
_MIN_BACKOFF_S = 0.1
_MAX_WAITING_BACKOFF_S = 0.25  # for an engine that is being started: every wait here is added to the time it takes
_MAX_BACKOFF_S = 2.0
_HEARTBEAT_CHECKS = 4
_PROGRESS_LOG_S = 5.0  # between two lines about an engine that loads
_SAID_LATELY = "loading"
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    # A peer whose machine has vanished; a peer that hangs is found by the heartbeat, in less time.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A channel per attempt with its own connection: the back-off is ours alone, not gRPC's on top of it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # http_proxy in the environment is for the way out, not for the machine beside this one.
    ("grpc.enable_http_proxy", 0),
)

AttachCall = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]


class EngineLostError(Exception):
    """The stream has ended or must be given up; says why."""


class EngineNotReadyError(Exception):
    """An engine answers that takes no frontends now, as while it loads; says what it is doing."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """An engine that is there: what it serves, and the stream to submit to.

    Attributes:
        engine: its name in the metrics.
    """

    engine: str
    instance_id: str
    model: ServedModel
    session: EngineSession


class EngineClient:
    """Keeps this process attached to one engine.

    Args:
        address: HOST:PORT or unix:PATH.
        tokenizers: gives the tokenizer that the engine's model needs.
        metrics: told what the engine says of itself.
        heartbeat_timeout_s: without a message for this long the engine counts as gone.
        on_change: called when `serving` may have changed.
    """

    def __init__(
        self,
        address: str,
        tokenizers: TokenizerSource,
        metrics: EngineMetrics,
        *,
        heartbeat_timeout_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._address = address
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_change = on_change
        self._frontend_id = uuid.uuid4().hex
        self._attachment: Attachment | None = None
        self._engine_state = pb.ENGINE_STATE_UNSPECIFIED
        self._noted_causes: set[str] = set()  # why there is no engine, as far as the log has said it since the last one
        self._progress_logged_at_s = float("-inf")
        self._num_messages = 0
        self._due = asyncio.Event()
        self._parting_error: RequestError | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def serving(self) -> bool:
        """Whether requests are taken."""
        return self._attachment is not None and self._engine_state == pb.ENGINE_STATE_SERVING

    def attachment(self) -> Attachment:
        """The engine to work with now.

        Raises:
            EngineUnavailable: there is none, or it takes nothing new.
        """
        if self._attachment is None:
            raise EngineUnavailable("no engine is attached", retry_after_s=_MAX_BACKOFF_S)  # why: see the log
        if not self.serving:
            state = pb.EngineState.Name(self._engine_state).removeprefix("ENGINE_STATE_").lower()
            raise EngineUnavailable(f"the engine is {state}", retry_after_s=_MAX_BACKOFF_S)
        return self._attachment

    def start(self) -> None:
        """Starts connecting in the background. May be called again."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine-client")

    async def stop(self, error: RequestError) -> None:
        """Ends the stream; what is still open fails with `error`. May be called again."""
        if self._task is not None:
            self._parting_error = error
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        max_backoff_s = _MAX_WAITING_BACKOFF_S
        while True:
            try:
                await self._attach()
            except Exception as error:  # whatever it is, the next attempt may succeed, and nobody else would make one
                self._note_away(error)
                if isinstance(error, EngineNotReadyError):
                    max_backoff_s = _MAX_WAITING_BACKOFF_S
            finally:
                was_attached = self._attachment is not None
                self._detach()
            if was_attached:
                backoff_s, max_backoff_s = _MIN_BACKOFF_S, _MAX_BACKOFF_S
            else:
                backoff_s = min(backoff_s * 2, max_backoff_s)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    def _note_away(self, error: Exception) -> None:
        """Says why there is no engine: each cause once until one is attached again, not once per attempt."""
        was_attached = self._attachment is not None
        level, is_defect = logging.WARNING, False
        reason = cause = str(error) or type(error).__name__
        match error:
            case grpc.aio.AioRpcError():
                reason = f"{error.code().name}: {error.details()}"
                cause = f"{error.code().name} {was_attached}"  # the details are worded differently by every attempt
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    level = logging.ERROR  # waiting will not help, unless somebody does something
                elif not was_attached:
                    level = logging.INFO
            case EngineNotReadyError():
                level, now_s = logging.INFO, time.monotonic()
                if now_s < self._progress_logged_at_s + _PROGRESS_LOG_S:
                    cause = _SAID_LATELY
                elif cause not in self._noted_causes:
                    self._progress_logged_at_s = now_s
                reason = f"not ready, {reason}"
            case TokenizerMismatch():
                level = logging.ERROR
            case EngineLostError() | ProtocolViolation():
                pass
            case _:
                level, is_defect = logging.ERROR, True
        if cause in self._noted_causes or cause == _SAID_LATELY:
            level = logging.DEBUG
        self._noted_causes.add(cause)
        logger.log(level, "no engine at %s: %s", self._address, reason, exc_info=error if is_defect else None)

    def _detach(self) -> None:
        attachment, self._attachment = self._attachment, None
        self._engine_state = pb.ENGINE_STATE_UNSPECIFIED
        if attachment is not None:
            self._metrics.detach()
            attachment.session.end(
                self._parting_error or EngineUnavailable("the engine went away", retry_after_s=_MAX_BACKOFF_S)
            )
            self._on_change()

    async def _attach(self) -> None:
        async with grpc.aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS) as channel:
            stub: EngineServiceAsyncStub = EngineServiceStub(channel)
            call = stub.Attach()
            try:
                welcome = await self._hello(channel, call)
                model = await self._served_model(stub, welcome.info)
                session = EngineSession(
                    vocab_size=model.vocab_size, step_window=welcome.step_window, wake=self._due.set
                )
                self._attachment = Attachment(self._metrics.engine, welcome.engine_instance_id, model, session)
                self._metrics.attach(welcome)
                self._noted_causes.clear()
                logger.info(
                    "engine %s attached: instance %s, model %s, max_model_len %d",
                    self._address,
                    welcome.engine_instance_id,
                    model.name,
                    model.max_model_len,
                )
                self._note_state(welcome.status)
                await _until_first_fails(self._read(call, session), self._write(call, session), self._watch())
            finally:
                call.cancel()

    async def _hello(self, channel: grpc.aio.Channel, call: AttachCall) -> pb.Welcome:
        hello = pb.Hello(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            frontend_id=self._frontend_id,
            frontend_version=__version__,
            tokenizer_sha256=self._tokenizers.own_sha256,
        )
        try:
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                await call.write(pb.AttachRequest(command_seq=1, hello=hello))
                response = await call.read()
        except TimeoutError as error:
            raise EngineLostError(f"no welcome within {_WELCOME_TIMEOUT_S:g} s") from error
        except grpc.aio.AioRpcError as error:
            # The same status says that nobody is there; only then the channel is not connected.
            if error.code() is grpc.StatusCode.UNAVAILABLE and channel.get_state() is grpc.ChannelConnectivity.READY:
                raise EngineNotReadyError(error.details()) from error
            raise
        if not isinstance(response, pb.AttachResponse) or response.WhichOneof("event") != "welcome":
            raise EngineLostError("the engine's first message is not a welcome")
        return response.welcome

    async def _served_model(self, stub: "EngineServiceAsyncStub", info: pb.EngineInfo) -> ServedModel:
        tokenizer, defaults = await self._tokenizers.get(stub, info.tokenizer_sha256)
        if tokenizer.vocab_size > info.vocab_size:
            logger.warning("the tokenizer has %d tokens, the model %d", tokenizer.vocab_size, info.vocab_size)
        return ServedModel(
            name=info.model,
            weights_revision=info.weights_revision,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            end_token_ids=tuple(info.end_token_ids),
            max_logprobs=info.max_logprobs,
            tokenizer=tokenizer,
            defaults=defaults,
        )

    async def _read(self, call: AttachCall, session: EngineSession) -> None:
        while True:
            response = await call.read()
            if not isinstance(response, pb.AttachResponse):
                raise EngineLostError("the engine closed the stream")
            self._num_messages += 1
            match response.WhichOneof("event"):
                case "step":
                    session.deal_step(response.step)
                    self._metrics.note_step(response.step)
                case "admission":
                    session.deal_admission(response.admission)
                case "status":
                    self._metrics.note_status(response.status)
                    self._note_state(response.status)
                case "drain":
                    logger.warning("engine %s stops in %d s", self._address, response.drain.grace.seconds)
                    self._note_state(pb.EngineStatus(state=pb.ENGINE_STATE_DRAINING))
                case other:
                    logger.debug("engine %s sent %s, which this version does not know", self._address, other)

    async def _write(self, call: AttachCall, session: EngineSession) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            for command in session.take_commands():
                try:
                    await call.write(command)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                    raise EngineLostError("the stream broke off") from error

    async def _watch(self) -> None:
        # Counted in turns of this loop, not by the clock: if this process is held up, the engine is not to blame.
        last, num_silent = -1, 0
        while num_silent < _HEARTBEAT_CHECKS:
            last, seen = self._num_messages, last
            num_silent = num_silent + 1 if last == seen else 0
            await asyncio.sleep(self._heartbeat_timeout_s / _HEARTBEAT_CHECKS)
        raise EngineLostError(f"no message for {self._heartbeat_timeout_s:g} s")

    def _note_state(self, status: pb.EngineStatus) -> None:
        if status.state != self._engine_state:
            self._engine_state = status.state
            detail = f": {status.detail}" if status.detail else ""
            logger.info("engine %s is %s%s", self._address, pb.EngineState.Name(status.state), detail)
            self._on_change()


async def _until_first_fails(*coroutines: Coroutine[object, object, None]) -> None:
    """Runs all until one raises; cancels the others and raises what that one raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:  # in this order: of several reasons the first one's is told
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
