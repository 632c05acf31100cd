"""Wires the frontend together: engine connections, services and servers, and the order of their start and stop."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from chairlift.service.health import Health, add_health
from chairlift.service.process_limits import ProcessLimitError, check_process_limits, raise_file_limit
from chairlift.service.service_classes import ServiceClass, ServiceClassError, read_service_classes
from chairlift.v1 import generation_service_pb2
from chairlift.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from frontend import __version__
from frontend.access.api_keys import Access, ApiKey, check_classes, load_keys
from frontend.access.engine_tls import load_engine_tls
from frontend.access.file_watch import FileWatch
from frontend.access.tls import load_tls
from frontend.api.active_calls import ActiveCalls
from frontend.api.grpc.api_key_interceptor import ApiKeyInterceptor
from frontend.api.grpc.capacity_interceptor import CapacityInterceptor
from frontend.api.grpc.error_interceptor import ErrorInterceptor
from frontend.api.grpc.reflection import add_reflection
from frontend.api.grpc.server import SERVICE_NAME, GenerationService
from frontend.api.ports import GRPC_ADVICE, HTTP_ADVICE, cannot_listen, try_ports
from frontend.config import FrontendConfig
from frontend.errors import ConfigError, EngineUnavailable, ServerDraining
from frontend.generation.admission import Admission
from frontend.generation.feasibility import Feasibility
from frontend.generation.generation import Services
from frontend.generation.pipeline import GenerationPipeline
from frontend.generation.retry_calendar import BOOKABLE_SHARE, RetryCalendar
from frontend.generation.retry_ticket import MIN_KEY_BYTES, RetryTickets
from frontend.limits import MAX_REQUEST_BYTES
from frontend.observability.metrics import Metrics
from frontend.observability.trace_context import GrpcOriginInterceptor, HttpOriginMiddleware
from frontend.observability.traffic import log_traffic
from frontend.routing.adapter_control import AdapterControl
from frontend.routing.router import Router
from frontend.text.chat_renderer import ChatRenderer
from frontend.text.isolated.process import JobLimits
from frontend.text.isolated.worker import Clock
from frontend.text.structured.compiler import GrammarCompiler
from frontend.text.tokenizer_source import TokenizerSource
from frontend.types import WorkerPlace

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from frontend.api.http.server import HttpServer
    from frontend.observability.otlp import OtlpSpans

logger = logging.getLogger(__name__)

_MAX_METADATA_BYTES = 16 << 10
# High, because a client that opens more before it knows this setting gets UNAVAILABLE for the rest.
_MAX_STREAMS_PER_CONNECTION = 4096
_HANDSHAKE_TIMEOUT_S = 20.0
_SETTLE_S = 1.0


class FrontendApp:
    """One frontend process. Everything runs on the event loop that calls `start`.

    Args:
        config: flags.
        place: identity among the workers that share its ports; None for a single process.
        warm_up: start the chat template process as soon as a model is known, before the first conversation.

    Raises:
        ConfigError: the tokenizer's folder, the chat template, a key or a certificate cannot be used.
    """

    def __init__(self, config: FrontendConfig, place: WorkerPlace | None = None, *, warm_up: bool = False) -> None:
        self._config = config
        self._place = place
        self._warms_up = warm_up
        self._classes = _service_classes(config.service_classes)
        self._access = Access(*_keys(config, self._classes), trusts_gateway=config.trust_gateway_headers)
        self._tls = load_tls(config)
        self._watches = self._file_watches()
        self._tokenizers = TokenizerSource(config.tokenizer, config.chat_template)
        self._health = Health(SERVICE_NAME)
        self.admission = Admission(max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens)
        self.metrics = Metrics(config.metrics_prefix, self.admission, place)
        self.engines = Router(
            config.engine,
            self._tokenizers,
            self.metrics,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            step_timeout_s=config.step_timeout_s,
            failover_timeout_s=config.failover_timeout_s,
            max_moves=config.max_moves,
            on_change=self._update_health,
            tls=load_engine_tls(config),
        )
        self.calls = ActiveCalls()
        self._spans = _spans(config.otlp_traces_endpoint) if config.otlp_traces_endpoint else None
        limits = JobLimits(config.grammar_timeout_s, config.grammar_memory_bytes, clock=Clock.CPU)
        self.grammars = GrammarCompiler(limits)
        self._chats = ChatRenderer(default_kwargs=config.default_chat_template_kwargs)
        self._feasibility = Feasibility(
            self.engines.forecast,
            _retry_tickets(config.retry_ticket_key_file),
            self.metrics.targets,
            calendar=RetryCalendar(horizon_s=config.retry_horizon_s, share=BOOKABLE_SHARE / config.workers),
            unix_offset_s=lambda: time.time() - time.monotonic(),  # the clock may be set while this process runs
        )
        services = Services(
            engines=self.engines,
            admission=self.admission,
            feasibility=self._feasibility,
            grammars=self.grammars,
            chats=self._chats,
            token_window=config.token_window,
            coalesce=config.coalesce,
        )
        self._generations = GenerationPipeline(
            services,
            self.metrics,
            classes=self._classes,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            spans=self._spans,
            log_requests=config.log_requests,
            log_prompts=config.log_prompts,
        )
        self._needs_origins = self._spans is not None or config.log_requests
        self._http = self._http_server() if config.http else None
        self._traffic_log: asyncio.Task[None] | None = None
        self._warm_up: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._draining = False
        self._checked_classes = False
        self._server: grpc.aio.Server | None = None
        self.port = 0

    @property
    def http_port(self) -> int | None:
        """The port of HTTP; None without HTTP."""
        return self._http.port if self._http is not None else None

    async def start(self) -> None:
        """Opens the ports and starts looking for engines.

        Raises:
            ConfigError: a port cannot be opened, or the limits on threads or files are too low.
        """
        raise_file_limit()
        try:
            check_process_limits()
        except ProcessLimitError as error:
            raise ConfigError(str(error)) from None
        config = self._config
        server = grpc.aio.server(
            interceptors=[
                ErrorInterceptor(stall_timeout_s=config.stall_timeout_s),
                ApiKeyInterceptor(self._access),
                CapacityInterceptor(self._generations, self.calls),
                *([GrpcOriginInterceptor()] if self._needs_origins else []),
            ],
            options=_server_options(config),
        )
        service = GenerationService(
            self._generations,
            self.calls,
            stall_timeout_s=config.stall_timeout_s,
            default_timeout_s=config.default_timeout_s,
            adapters=self._adapter_changes(),
        )
        add_GenerationServiceServicer_to_server(service, server)
        add_health(self._health, server)
        if config.reflection:
            add_reflection([generation_service_pb2.DESCRIPTOR], server)
        host = f"[{config.host}]" if ":" in config.host else config.host
        if self._place is None:  # otherwise the parent has reserved the ports, and clients may already connect
            try_ports(config)
        try:
            address = f"{host}:{config.port}"
            self.port = (
                server.add_secure_port(address, self._tls.credentials)
                if self._tls
                else server.add_insecure_port(address)
            )
        except RuntimeError as error:
            raise cannot_listen(config.host, config.port, error, GRPC_ADVICE) from error
        await self._start_http()
        await server.start()
        self._server = server
        self.engines.start()
        if config.log_stats_interval_s:
            traffic = self.metrics.requests.traffic
            self._traffic_log = asyncio.create_task(log_traffic(traffic, config.log_stats_interval_s))
        if self._warms_up:
            self._warm_up = asyncio.create_task(self._prepare_chats())
        for watch in self._watches:
            watch.start()
        logger.info("listening on %s:%d, engine %s", host, self.port, ", ".join(config.engine))

    async def wait_serving(self, timeout_s: float | None) -> None:
        """Waits until requests are accepted.

        Raises:
            TimeoutError: they are not within `timeout_s`; never with None.
        """
        async with asyncio.timeout(timeout_s):
            while not self._health.serving:
                await self._health.wait_for_change()

    async def drain(self, grace_s: float) -> int:
        """Refuses new calls and waits until running ones have finished and their answers are sent.

        Calls that run longer than `grace_s` end with UNAVAILABLE. Ports that another frontend shares are closed.

        Returns: number of calls that finished in time.
        """
        self._draining = True
        self._update_health()
        self.calls.refuse_new()
        if self._config.reuse_port and self._place is None:
            self._leave_ports(grace_s)
        num_running = self.calls.num_active
        try:
            async with asyncio.timeout(grace_s):
                await self.calls.wait_idle()
                await self.calls.wait_sent()
                if self._http is not None:
                    await self._http.wait_sent()
        except TimeoutError:
            if self.calls.num_active:
                logger.warning("%d calls have not finished within %g s", self.calls.num_active, grace_s)
            else:
                logger.warning("some clients have not received their whole answers within %g s", grace_s)
        num_cut = self.calls.num_active
        await self.engines.stop(ServerDraining("this server has stopped", retry_after_s=1.0))
        return num_running - num_cut

    def _leave_ports(self, grace_s: float) -> None:
        """Leaves new connections to the frontend that shares the ports, and tells gRPC's clients to make some."""
        if self._http is not None:
            self._http.close_port()
        if self._server is not None:
            self._leaving = asyncio.create_task(self._server.stop(grace_s + _SETTLE_S))

    async def stop(self) -> None:
        """Stops everything. Running calls end with UNAVAILABLE, or are cancelled after a second."""
        self._draining = True
        self._update_health()
        self.calls.refuse_new()
        await self.engines.stop(ServerDraining("this server has stopped", retry_after_s=1.0))
        if self._http is not None:
            await self._http.stop()
        if self._server is not None:
            await self._server.stop(_SETTLE_S if self.calls.num_unsent else None)
        if self._leaving is not None:
            await self._leaving
        if self._traffic_log is not None:
            self._traffic_log.cancel()
        if self._warm_up is not None:
            self._warm_up.cancel()
        for watch in self._watches:
            await watch.stop()
        await self.grammars.stop()
        await self._chats.stop()
        self._tokenizers.close()
        if self._spans is not None:
            await self._spans.close()

    async def _prepare_chats(self) -> None:
        await self.wait_serving(None)
        try:
            await self._chats.prepare(self.engines.attachment().model.tokenizer)
        except EngineUnavailable:
            return  # the engine was lost; the first conversation starts the process
        except Exception:
            logger.exception("cannot prepare the chat template process")

    def _file_watches(self) -> list[FileWatch]:
        config, watches = self._config, []
        if self._tls is not None:
            watches.append(FileWatch("TLS certificate", self._tls.paths, self._tls.reload))
        if files := [path for path in (config.api_key_file, config.admin_api_key_file) if path is not None]:
            watches.append(FileWatch("API keys", files, self._reload_keys))
        return watches

    def _reload_keys(self) -> None:
        self._access.replace(*_keys(self._config, self._classes))

    def _adapter_changes(self) -> AdapterControl | None:
        """Returns what loads adapters, if that is allowed."""
        return self.engines.adapter_control if self._config.allow_runtime_lora_updating else None

    def _http_server(self) -> "HttpServer":
        # Imported here, so that a server without HTTP does not need these packages.
        from frontend.api.anthropic.endpoints import Messages, messages_api
        from frontend.api.http.app import make_app
        from frontend.api.http.call_runner import CallRunner
        from frontend.api.http.cors import with_cors
        from frontend.api.http.server import HttpServer
        from frontend.api.http.unknown_parameters import UnknownParameters
        from frontend.api.openai.endpoints import CompletionsHandler, openai_apis
        from frontend.api.openai.info_routes import InfoRoutes
        from frontend.api.openai.lora_routes import LoraRoutes
        from frontend.api.openai.responses.endpoints import Responses, responses_api

        config = self._config
        unknown_parameters = UnknownParameters(config.unknown_parameters)
        runner = CallRunner(
            self._generations,
            self.calls,
            unknown_parameters,
            stall_timeout_s=config.stall_timeout_s,
            default_timeout_s=config.default_timeout_s,
        )
        info_routes = InfoRoutes(
            self._generations,
            self.calls,
            self._health,
            unknown_parameters,
            self.metrics.render_aside,
            body_timeout_s=config.stall_timeout_s,
            since=self._place.since if self._place is not None else int(time.time()),
        )
        adapters = self._adapter_changes()
        lora_routes = None
        if adapters is not None:
            lora_routes = LoraRoutes(adapters, self.calls, unknown_parameters, body_timeout_s=config.stall_timeout_s)
        apis = [
            responses_api(Responses(runner)),
            messages_api(Messages(runner)),
            *openai_apis(CompletionsHandler(runner), info_routes, lora_routes),
        ]
        app: ASGIApp = with_cors(make_app(apis, self._access), config.allowed_origins)
        return HttpServer(
            HttpOriginMiddleware(app) if self._needs_origins else app,
            config.http_host or config.host,
            config.http_port,
            tls=self._tls.context if self._tls else None,
            reuse_port=config.reuse_port,
            stall_timeout_s=config.stall_timeout_s,
            settle_s=_SETTLE_S,
        )

    async def _start_http(self) -> None:
        if self._http is None:
            return
        try:
            await self._http.start()
        except OSError as error:
            host = self._config.http_host or self._config.host
            raise cannot_listen(host, self._config.http_port, error, HTTP_ADVICE) from error
        logger.info("listening for HTTP on port %d", self._http.port)

    def _update_health(self) -> None:
        self._health.set_serving(self.engines.serving and not self._draining)
        if not self._checked_classes:
            self._check_classes()

    def _check_classes(self) -> None:
        """Logs once, when an engine is attached, which targets of classes it cannot meet or predict."""
        min_step_ms = 1e3 * self.engines.forecast(0.0).min_step_s
        self._checked_classes = self.engines.serving
        never = [one.name for one in self._classes.values() if one.ttft_s is not None and one.when_infeasible != "wait"]
        if self.engines.serving and min_step_ms == 0.0 and never:
            logger.warning(
                "--service-classes: when_infeasible of %s has no effect, because the engine predicts no first tokens; "
                "start it with --scheduling-policy slo", ", ".join(never),
            )  # fmt: skip
        if texts := self._feasibility.impossible(self._classes.values()):
            logger.warning(
                "--service-classes: %s, but a step with one request takes %.3g ms: no request of the class can meet it",
                "; ".join(texts), min_step_ms,
            )  # fmt: skip


def _keys(config: FrontendConfig, classes: Mapping[str, ServiceClass]) -> tuple[tuple[ApiKey, ...], tuple[ApiKey, ...]]:
    """Returns the keys of clients and of administrators."""
    keys = load_keys(config.api_key, config.api_key_file)
    admin_keys = load_keys(config.admin_api_key, config.admin_api_key_file, flag="--admin-api-key")
    check_classes([*keys, *admin_keys], classes)
    return keys, admin_keys


def _service_classes(path: Path | None) -> Mapping[str, ServiceClass]:
    """Returns the classes of the file of --service-classes by name; none without it."""
    try:
        return {} if path is None else read_service_classes(path)
    except ServiceClassError as error:
        raise ConfigError(f"--service-classes {error}") from None


def _retry_tickets(path: Path | None) -> RetryTickets:
    """Returns what signs tickets, with the key in the file of --retry-ticket-key-file or a random one."""
    if path is None:
        return RetryTickets(secrets.token_bytes(32))
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--retry-ticket-key-file {path} cannot be read: {error.strerror}") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"--retry-ticket-key-file {path} has {len(key)} bytes, at least {MIN_KEY_BYTES} are needed")
    return RetryTickets(key)


def _spans(endpoint: str) -> "OtlpSpans":
    try:
        from frontend.observability.otlp import OtlpSpans, exporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is missing): pip install 'chairlift[otel]'"
        ) from error
    return OtlpSpans(exporter(endpoint), __version__)


def loop_factory(*, use_uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns the event loop's factory for `asyncio.Runner`; None: asyncio's own loop."""
    if not use_uvloop:
        return None
    import uvloop  # not available on every platform

    return uvloop.new_event_loop


def _server_options(config: FrontendConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        # Both, because between the two limits gRPC refuses calls at random.
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", _MAX_STREAMS_PER_CONNECTION),
        ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.so_reuseport", int(config.reuse_port)),
        # With the default of 1000, many streams opened at once fail with unclear errors.
        ("grpc.server.max_pending_requests", 16384),
        ("grpc.server.max_pending_requests_hard_limit", 32768),
        # Clients ping during long prefills; the default rejects that with "Too many pings". Needs exactly this key.
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # Its calls finish: without max_connection_age_grace_ms, gRPC does not limit how long an old connection waits.
        ("grpc.max_connection_age_ms", int(config.max_connection_age_s * 1000)),
    ]
