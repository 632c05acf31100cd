"""The methods of `vllm.grpc.engine.VllmEngine`. All of it runs on the IO thread, like `engine.serving.server`."""

# ruff: noqa: N802, ARG002 - method names and arguments are defined by the service

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from chairlift.service.structured.grammars import grammar_of
from chairlift.service.structured.output_constraint import ConstraintError, OutputConstraint
from engine.errors import InvalidRequest, QueueFull
from engine.interfaces import EngineState
from engine.serving.client_errors import CallRefused
from engine.serving.convert import RequestLimits
from engine.serving.matcher_compiler import MatcherCompiler
from engine.serving.outgoing import Receiver
from engine.serving.server import EngineService
from engine.serving.session import Session
from engine.serving.vllm.cache_log import CacheLog
from engine.serving.vllm.call import Call
from engine.serving.vllm.convert import wanted_answers
from engine.serving.vllm.description import LoadMeter, model_info, server_info, tokenizer_archive, tokenizer_chunks
from engine.serving.vllm.local_session import LocalSession

SERVICE_NAME: str = vllm_pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)


class VllmService(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]  # the package has no types for it
    """Serves one engine to gateways, beside its own service.

    Args:
        engine: the service of the engine, which has the state and the sessions.
        cache_log: what the prefix cache holds.

    Invariant: `_calls` holds the open Generate calls by their request ids, `_aborted` those aborted in preparation.
    """

    def __init__(self, engine: EngineService, cache_log: CacheLog) -> None:
        self._engine = engine
        self._cache_log = cache_log
        self._session: LocalSession | None = None
        self._calls: dict[str, Call | None] = {}  # None: being prepared
        self._aborted: set[str] = set()
        self._archive: bytes | None = None
        self._load_meter = LoadMeter()
        self._began_at_s = time.monotonic()
        self._received_at_s = 0.0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the methods to a server."""
        vllm_grpc.add_VllmEngineServicer_to_server(self, server)

    async def Generate(self, request: Any, context: _Context) -> None:
        """Streams the tokens of one or more answers, or sends each as a whole."""
        parts = self._engine.serving_parts()
        self._received_at_s = time.time()
        wanted = wanted_answers(request, RequestLimits.of(parts.info), parts.info.max_model_len)
        if wanted.request_id in self._calls:
            raise InvalidRequest(f"request_id {wanted.request_id[:64]!r} is in use: its request has not ended")
        if len(self._calls) >= parts.max_open_requests:  # before its constraint waits for a thread
            raise QueueFull(f"{len(self._calls)} calls are open, at most {parts.max_open_requests} are allowed")
        self._calls[wanted.request_id] = None
        try:
            remaining_s = context.time_remaining()
            end_s = None if remaining_s is None else time.monotonic() + remaining_s
            grammar = await self._grammar(wanted.constraint, parts.grammars)
            bytes_of = await self._spelling(bool(wanted.stop_texts), parts.grammars)
            call = Call(wanted, self._local_session(), grammar, bytes_of, end_s)
            self._calls[wanted.request_id] = call
            if wanted.request_id in self._aborted:
                call.abort()
            try:
                async for response in call.responses():
                    await context.write(response)
            finally:
                call.close()
        finally:
            del self._calls[wanted.request_id]
            self._aborted.discard(wanted.request_id)

    async def Abort(self, request: Any, context: _Context) -> Any:
        """Ends calls with what they have; unknown ids are ignored."""
        for request_id in request.request_ids:
            call = self._calls.get(request_id)
            if call is not None:
                call.abort()
            elif request_id in self._calls:
                self._aborted.add(request_id)
        return vllm_pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: _Context) -> Any:
        """Says whether the engine takes requests, and if not, why."""
        is_healthy = self._engine.state is EngineState.SERVING
        return vllm_pb.HealthCheckResponse(healthy=is_healthy, message="" if is_healthy else self._engine.detail)

    async def GetModelInfo(self, request: Any, context: _Context) -> Any:
        """Describes the model."""
        return model_info(self._engine.loaded_parts())

    async def GetServerInfo(self, request: Any, context: _Context) -> Any:
        """Describes the engine."""
        parts = self._engine.loaded_parts()
        return server_info(
            parts.info,
            num_calls=len(self._calls),
            received_at_s=self._received_at_s,
            uptime_s=time.monotonic() - self._began_at_s,
        )

    async def GetLoads(self, request: Any, context: _Context) -> Any:
        """Returns the load of the engine, which is one data-parallel rank."""
        parts = self._engine.loaded_parts()
        return self._load_meter.loads(parts.info, self._engine.snapshot(), time.monotonic())

    async def GetTokenizer(self, request: Any, context: _Context) -> None:
        """Sends the tokenizer's files as a ZIP archive."""
        tokenizer = self._engine.loaded_parts().tokenizer
        if not tokenizer.files:
            raise CallRefused(grpc.StatusCode.NOT_FOUND, "the model has no tokenizer")
        if self._archive is None:
            self._archive = await asyncio.to_thread(tokenizer_archive, tokenizer)
        for chunk in tokenizer_chunks(self._archive):
            await context.write(chunk)

    async def SubscribeKvEvents(self, request: Any, context: _Context) -> None:
        """Sends what the prefix cache holds, then what enters and leaves it."""
        self._engine.loaded_parts()
        self._local_session()  # its end ends the subscription
        async for batch in self._cache_log.follow(request.start_sequence_number):
            await context.write(batch)

    async def Embed(self, request: Any, context: _Context) -> None:
        """Is not supported."""
        raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, "Embed: this engine generates text")

    async def FlushCache(self, request: Any, context: _Context) -> None:
        """Is not supported."""
        raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, "FlushCache: restart the engine instead")

    async def StartProfile(self, request: Any, context: _Context) -> None:
        """Is not supported."""
        raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, "StartProfile: see --step-log instead")

    async def StopProfile(self, request: Any, context: _Context) -> None:
        """Is not supported."""
        raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, "StopProfile: see --step-log instead")

    def _local_session(self) -> LocalSession:
        if self._session is None:
            self._session = LocalSession(self._open_session, self._cache_log.close)
        return self._session

    def _open_session(self, receiver: Receiver) -> Session:
        session = self._engine.open_session(receiver)
        _log.info("Session %s: requests of the vLLM API", session.session_id)
        return session

    async def _grammar(self, constraint: OutputConstraint | None, grammars: MatcherCompiler) -> str:
        """Converts a constraint on a thread: a large schema takes long."""
        if constraint is None:
            return ""
        try:
            return await asyncio.wrap_future(grammars.run(lambda: grammar_of(constraint.kind, constraint.text)))
        except ConstraintError as error:
            raise InvalidRequest(f"{constraint.field}: {error}") from None
        except QueueFull as full:
            raise QueueFull(f"{constraint.field}: {full}") from full

    async def _spelling(self, is_needed: bool, grammars: MatcherCompiler) -> Callable[[int], bytes]:
        if not is_needed:
            return lambda _: b""
        try:
            tokenizer = await asyncio.wrap_future(grammars.run(grammars.load_tokenizer))
        except InvalidRequest as error:
            raise InvalidRequest(f"sampling_params.stop: {error}") from None
        return tokenizer.bytes_of


def serve_vllm(log_stats_interval_s: float) -> tuple[EngineService, Callable[[grpc.aio.Server], None]]:
    """Returns an engine's own service, and what adds vLLM's service of the same engine to its server.

    Args:
        log_stats_interval_s: see `EngineService`.
    """
    cache_log = CacheLog()
    engine = EngineService(log_stats_interval_s, other_services=(SERVICE_NAME,), on_cache_events=cache_log.add)
    return engine, VllmService(engine, cache_log).add_to
