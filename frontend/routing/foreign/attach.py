"""Stands in for the Attach stream of an engine: commands in, events out, Generate calls behind.

Differences from an engine of Chairlift: the instance id is new with each attachment, as the protos have none;
heartbeats are answers to polls; steps are what arrived between two reads.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import PROTOCOL_MINOR, tokenizer_sha256
from frontend.engine_address import EngineKind
from frontend.errors import ConfigError
from frontend.routing.cached_blocks import CachedBlocks
from frontend.routing.connection_log import EngineLostError, EngineNotReadyError
from frontend.routing.foreign.cache_feed import follow_cache
from frontend.routing.foreign.dialect import MAX_LOGPROBS, Dialect, DialectError, EngineFacts, EngineLoads
from frontend.routing.foreign.events import EventBuffer
from frontend.routing.foreign.generation import Generation
from frontend.routing.foreign.tokenizer_bundle import end_tokens, fetch_archive, tokenizer_files

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_CALL_TIMEOUT_S = 8.0
_TOKENIZER_TIMEOUT_S = 60.0
WELCOME_TIMEOUT_S = 5 * _CALL_TIMEOUT_S + _TOKENIZER_TIMEOUT_S  # of all calls of a handshake, each with its own timeout
_STEP_WINDOW = 1 << 16  # acknowledgements are not needed here: credits bound what is unread
_UNKNOWN_FREE_BLOCKS = 1 << 31


class MissingProtosError(ConfigError):
    """The package with the protos is not installed."""


def make_stub(
    kind: EngineKind, channel: grpc.aio.Channel, address: str, own_files: Mapping[str, bytes]
) -> "ForeignStub":
    """Returns what stands in for the stub of an engine.

    Args:
        own_files: the tokenizer's files that the operator gave; empty: the engine's are used.

    Raises:
        MissingProtosError: the extra `engines` is not installed.
    """
    return ForeignStub(_dialect_type(kind)(channel), address, own_files)


def check_installed(kind: EngineKind) -> None:
    """Checks that engines of a kind can be used.

    Raises:
        MissingProtosError: the extra `engines` is not installed.
    """
    if kind is EngineKind.CHAIRLIFT:
        return
    try:
        from smg_grpc_proto.generated import common_pb2  # noqa: F401
    except ImportError as error:
        raise MissingProtosError(
            f"--engine {kind}://... needs the engine's protos ({error.name} is missing): "
            "pip install 'chairlift[engines]'"
        ) from error


def _dialect_type(kind: EngineKind) -> type[Dialect]:
    check_installed(kind)
    match kind:
        case EngineKind.VLLM:
            from frontend.routing.foreign.vllm import VllmDialect

            return VllmDialect
        case EngineKind.SGLANG:
            from frontend.routing.foreign.sglang import SglangDialect

            return SglangDialect
        case EngineKind.TRTLLM:
            from frontend.routing.foreign.trtllm import TrtllmDialect

            return TrtllmDialect
    raise AssertionError(f"{kind!r} has a stub of its own")


class ForeignStub:
    """The calls of one channel that the frontend makes: Attach, GetTokenizer and LoadAdapter.

    Args:
        dialect: speaks to the engine.
        address: the engine's address, for logs.
        own_files: see `make_stub`.
    """

    def __init__(self, dialect: Dialect, address: str, own_files: Mapping[str, bytes]) -> None:
        self._dialect = dialect
        self._address = address
        self._files = dict(own_files)

    def Attach(self) -> "ForeignAttach":  # noqa: N802 - as in the generated stub
        """Returns the stand-in for a stream."""
        return ForeignAttach(self._dialect, self._address, self._files)

    async def GetTokenizer(  # noqa: N802 - as in the generated stub
        self,
        request: pb.GetTokenizerRequest,  # noqa: ARG002
        timeout: float,  # noqa: ARG002
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """Yields the files that the handshake fetched."""
        for name, data in self._files.items():
            yield pb.GetTokenizerResponse(file_name=name, data=data)

    async def LoadAdapter(  # noqa: N802 - as in the generated stub
        self,
        request: pb.LoadAdapterRequest,  # noqa: ARG002
        timeout: float,  # noqa: ARG002
    ) -> pb.LoadAdapterResponse:
        """Refuses, as an engine would.

        Raises:
            grpc.aio.AioRpcError: always.
        """
        message = f"{self._dialect.kind} engines do not load adapters here"
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), grpc.aio.Metadata(), details=message
        )


class ForeignAttach:
    """One attachment. `write` takes commands, `read` returns events, `cancel` ends everything.

    Args:
        dialect: speaks to the engine.
        address: for logs.
        files: the tokenizer's files; gets the engine's if there are none.

    Attributes:
        dialect, events, info: see `generation.Host`.
        cached_blocks: the engine's prefix cache, if it publishes it.
    """

    def __init__(self, dialect: Dialect, address: str, files: dict[str, bytes]) -> None:
        self.dialect = dialect
        self.events = EventBuffer()
        self.info = pb.EngineInfo()
        self.cached_blocks = CachedBlocks()
        self._address = address
        self._files = files
        self._hello: pb.Hello | None = None
        self._is_welcome = False
        self._open: dict[int, Generation] = {}  # by handle
        self._tasks: set[asyncio.Task[None]] = set()
        self._instance_id = uuid.uuid4().hex
        self._numbers = count(1)
        self._warned: set[str] = set()
        self._has_loads = True
        self._num_turns = 1  # see EngineStatus.loop_turns

    async def write(self, request: pb.AttachRequest) -> None:
        """Takes a command."""
        match request.WhichOneof("command"):
            case "hello":
                self._hello = request.hello
            case "submit":
                for submission in request.submit.submissions:
                    name = f"{submission.request_id}-{self._instance_id[:8]}-{next(self._numbers)}"
                    generation = Generation(self, submission, name.lstrip("-"))
                    self._open[submission.handle] = generation
                    self._keep(generation.start())
            case "cancel":
                for handle in request.cancel.handles:
                    if handle in self._open:
                        self._open[handle].cancel(request.cancel.reason)
            case "credit":
                for handle, tokens in zip(request.credit.handles, request.credit.tokens, strict=True):
                    if handle in self._open:
                        self._open[handle].grant(tokens)

    async def read(self) -> pb.AttachResponse:
        """Returns the next event.

        Raises:
            EngineLostError, EngineNotReadyError, ConfigError, grpc.aio.AioRpcError: the attachment has ended.
        """
        if self._is_welcome:
            return await self.events.read()
        welcome = await self._welcome()
        self._is_welcome = True
        self.events.report(welcome.status)  # the session takes loads from status events
        self._keep(asyncio.create_task(self._poll(), name="foreign-poll"))
        following = follow_cache(self.dialect, self.cached_blocks, self._address)
        self._keep(asyncio.create_task(following, name="foreign-cache"))
        return pb.AttachResponse(welcome=welcome)

    def cancel(self) -> None:
        """Ends all calls."""
        for generation in self._open.values():
            generation.close()
        self._open.clear()
        for task in self._tasks:
            task.cancel()

    # The handshake.

    async def _welcome(self) -> pb.Welcome:
        assert self._hello is not None, "Hello is the first command"
        try:
            facts = await self.dialect.facts(_CALL_TIMEOUT_S)
            loads = await self._heartbeat()
            takes_requests = await self.dialect.takes_requests(_CALL_TIMEOUT_S)
        except DialectError as error:
            raise EngineNotReadyError(str(error)) from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise EngineLostError(
                    f"it does not serve {self.dialect.service}: is it {self.dialect.kind} with a gRPC server?"
                ) from error
            raise
        if not takes_requests:
            raise EngineNotReadyError("its health service says NOT_SERVING: it warms up or stops")
        self.info = _engine_info(facts, loads)
        await self._read_tokenizer(self._hello.tokenizer_sha256)
        return pb.Welcome(
            protocol_minor=PROTOCOL_MINOR,
            engine_instance_id=self._instance_id,
            session_id=self._instance_id,
            info=self.info,
            step_window=_STEP_WINDOW,
            status=self._status(loads),
        )

    async def _read_tokenizer(self, own_sha256: bytes) -> None:
        """Completes `info` by the tokenizer: the operator's, which cannot be compared, or the engine's."""
        if own_sha256:
            self.info.tokenizer_sha256 = own_sha256
            self._add_end_tokens(end_tokens(self._files))
            return
        try:
            archive = await fetch_archive(self.dialect.tokenizer_chunks(_TOKENIZER_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            raise ConfigError(
                f"the engine does not send its tokenizer ({error.details()}): give --tokenizer a folder with the "
                "model's tokenizer files"
            ) from error
        files, end_token_ids = tokenizer_files(archive)
        self._files.clear()
        self._files.update(files)
        self.info.tokenizer_sha256 = tokenizer_sha256(files)
        self._add_end_tokens(end_token_ids)

    def _add_end_tokens(self, token_ids: Sequence[int]) -> None:
        """Adds those that the model's files name; engines report the first, or none."""
        known = set(self.info.end_token_ids)
        self.info.end_token_ids.extend(one for one in token_ids if one not in known and 0 <= one < self.info.vocab_size)

    # Heartbeats.

    async def _poll(self) -> None:
        try:
            while True:
                await asyncio.sleep(_POLL_S)
                try:
                    loads = await self._heartbeat()
                    takes_requests = await self.dialect.takes_requests(_CALL_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # silence is for the connection to judge
                        raise
                    continue
                if not any(generation.is_waiting for generation in self._open.values()):
                    self._num_turns += 1
                self._forget_ended()
                self.events.report(self._status(loads, takes_requests=takes_requests))
        except DialectError as error:
            self.events.fail(EngineLostError(f"the engine reports: {error}"))
        except grpc.aio.AioRpcError as error:
            self.events.fail(EngineLostError(f"{error.code().name}: {error.details()}"))

    async def _heartbeat(self) -> EngineLoads | None:
        if self._has_loads:
            try:
                return await self.dialect.heartbeat(_CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                self._has_loads = False
                self.warn("loads", "does not report its load: placement counts this frontend's requests only")
        if problem := await self.dialect.check_health(_CALL_TIMEOUT_S):
            raise DialectError(problem)
        return None

    def _status(self, loads: EngineLoads | None, *, takes_requests: bool = True) -> pb.EngineStatus:
        state = pb.ENGINE_STATE_SERVING if takes_requests else pb.ENGINE_STATE_DRAINING
        status = pb.EngineStatus(state=state, loop_turns=self._num_turns)
        if loads is None:
            status.load.num_running = len(self._open)
            status.load.num_free_blocks = _UNKNOWN_FREE_BLOCKS
            return status
        num_free = max(loads.capacity_tokens - loads.num_used_tokens, 0) // self.info.block_size
        status.load.num_running = loads.num_running
        status.load.num_waiting = loads.num_waiting
        status.load.num_waiting_prefill_tokens = loads.num_waiting_tokens
        status.load.num_free_blocks = int(num_free) if loads.capacity_tokens else _UNKNOWN_FREE_BLOCKS
        return status

    def _forget_ended(self) -> None:
        self._open = {handle: one for handle, one in self._open.items() if not one.has_ended}

    # Implements generation.Host.

    async def is_alive(self) -> bool:
        """Asks whether the engine is healthy; reports its loss if it is not."""
        try:
            problem = await self.dialect.check_health(_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return True
            problem = f"{error.code().name}: {error.details()}"
        if problem:
            self.events.fail(EngineLostError(problem))
        return not problem

    def note_message(self) -> None:
        """Notes that the engine has sent something."""
        self._num_turns += 1

    def warn(self, cause: str, message: str) -> None:
        """Logs a problem of the engine; each cause once."""
        level = logging.DEBUG if cause in self._warned else logging.WARNING
        self._warned.add(cause)
        logger.log(level, "engine %s %s", self._address, message)

    def abort(self, request_id: str) -> None:
        """Tells the engine to drop a request."""
        self._keep(asyncio.create_task(self._abort(request_id), name="foreign-abort"))

    async def _abort(self, request_id: str) -> None:
        try:
            await self.dialect.abort(request_id, _CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:  # the cancelled call says the same
            logger.debug("engine %s does not take an abort: %s", self._address, error.details())

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _engine_info(facts: EngineFacts, loads: EngineLoads | None) -> pb.EngineInfo:
    """Converts an engine's facts.

    Raises:
        ConfigError: a limit that is needed is missing.
    """
    if not 0 < facts.max_model_len < 1 << 31:
        raise ConfigError(f"the engine reports a context of {facts.max_model_len} tokens; it must be above 0")
    if not 0 < facts.vocab_size < 1 << 31:
        raise ConfigError(f"the engine reports a vocabulary of {facts.vocab_size} tokens; it must be above 0")
    capacity_tokens = loads.capacity_tokens if loads is not None else 0  # without loads its use is not known
    return pb.EngineInfo(
        model=facts.model,
        weights_revision=facts.revision,
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        num_kv_blocks=capacity_tokens // facts.block_size,
        max_num_seqs=facts.max_num_seqs,
        vocab_size=facts.vocab_size,
        end_token_ids=[token_id for token_id in facts.end_token_ids if 0 <= token_id < facts.vocab_size],
        max_logprobs=MAX_LOGPROBS,
        engine_version=loads.version if loads is not None and loads.version else facts.version,
    )
