"""The frontend's configuration: one frozen dataclass, and its flags and environment variables.

Knows nothing of the objects that are configured.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from chairlift.loopback import is_loopback
from chairlift.service.flag_kinds import Kind, choice, integer, number, path, repeated, switch, text
from chairlift.service.flags import FlagError, FlagParser, add_flags, check_flags, config_from, flag
from chairlift.service.logs import LOG_FORMATS, LOG_LEVELS
from frontend.engine_address import EngineAddress
from frontend.errors import ConfigError
from frontend.text.chat import REASONING_FORMATS, TOOL_FORMATS
from frontend.text.chat.template_kwargs import ALLOWED, are_template_kwargs, parse_json

_ANY_HOST = text("an address", lambda _: True, metavar="HOST")
_ADDRESSES = "HOST:PORT or unix:PATH, behind vllm://, sglang:// or trtllm:// for an engine of another project"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@*,]+")  # in the format of browsers, which compare it literally


def _is_address(value: str) -> bool:
    try:
        address = EngineAddress.parse(value).target
    except ValueError:
        return False
    if address.startswith("unix:"):
        return len(address) > len("unix:")
    host, colon, port = address.removeprefix("dns:").rpartition(":")
    return bool(host and colon and port.isascii() and port.isdigit() and 0 < int(port) <= 65535)


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """The frontend's settings, each with its flag; all are checked when the config is created.

    Raises:
        ConfigError: an invalid value; the message names the flag, the value and the allowed range.
    """

    host: str = flag(
        "127.0.0.1", _ANY_HOST,
        "address to listen on for gRPC; an address other than loopback needs TLS and an API key", group="address",
    )  # fmt: skip
    port: int = flag(50051, integer(0, 65535), "port to listen on for gRPC; 0 selects a free one")
    http: bool = flag(True, switch(), "serve OpenAI's and Anthropic's APIs, health and /metrics over HTTP")
    http_host: str = flag("", _ANY_HOST, "address to listen on for HTTP", default_text="as --host")
    http_port: int = flag(8000, integer(0, 65535), "port to listen on for HTTP; 0 selects a free one")
    allowed_origins: tuple[str, ...] = flag(
        (), repeated(text(
            "* or an origin such as https://example.org, without a path",
            lambda origin: origin == "*" or _ORIGIN.fullmatch(origin) is not None, metavar="ORIGIN",
        )),
        "web origin that may call over HTTP from a browser (CORS), such as https://example.org; * allows all. May be "
        "repeated; the variable separates origins by commas", default_text="none",
    )  # fmt: skip
    reuse_port: bool = flag(
        False, switch(), "share the ports with frontends that are started separately (SO_REUSEPORT); see also --workers"
    )
    max_connection_age_s: float = flag(
        1800.0, number(1, 2e6),
        "seconds after which a gRPC client is told to open a new connection; calls on the old one finish. Lower it "
        "below the time between the removal from a load balancer and SIGTERM, so that no client is left",
    )  # fmt: skip
    reflection: bool = flag(True, switch(), "serve gRPC server reflection, which grpcurl and other tools use")

    api_key: tuple[str, ...] = flag(
        (), repeated(text(metavar="KEY"), ""),
        "API key that calls must carry; may be repeated. All users of this machine can read the command line: prefer "
        "the variable or --api-key-file", group="keys and TLS", default_text="none: calls need no key", secret=True,
    )  # fmt: skip
    api_key_file: Path | None = flag(None, path(), "file with API keys, one per line; reloaded when it changes")
    admin_api_key: tuple[str, ...] = flag(
        (), repeated(text(metavar="KEY"), ""),
        "key for administration, which opens all else too; may be repeated. Only such keys then load and unload LoRA "
        "adapters. Prefer the variable or --admin-api-key-file, as for --api-key", default_text="none", secret=True,
    )  # fmt: skip
    admin_api_key_file: Path | None = flag(
        None, path(), "file with keys for administration, one per line; reloaded when it changes"
    )
    tls_cert: Path | None = flag(
        None,
        path(),
        "certificate chain (PEM), reloaded when it changes; gRPC and HTTP then accept TLS only",
    )
    tls_key: Path | None = flag(None, path(), "private key of --tls-cert (PEM, unencrypted)")
    tls_client_ca: Path | None = flag(
        None, path(), "CA certificates (PEM) used to verify client certificates (mutual TLS)"
    )
    insecure_bind: bool = flag(
        False, switch(), "allow a non-loopback --host without TLS and an API key, for example behind a proxy"
    )

    engine: tuple[str, ...] = flag(
        ("127.0.0.1:50052",), repeated(text(_ADDRESSES, _is_address, metavar="ADDRESS")),
        "address of an engine: HOST:PORT or unix:PATH, or vllm://, sglang:// or trtllm://HOST:PORT for an engine of "
        "another project; may be repeated, the variable separates addresses by commas. A host name stands for all of "
        "its addresses, which are looked up repeatedly", group="engines",
    )  # fmt: skip
    engine_tls_ca: Path | None = flag(
        None, path(), "CA certificates (PEM) used to verify engines; connections to unix sockets are not encrypted"
    )
    engine_tls_client_cert: Path | None = flag(
        None, path(), "certificate chain (PEM) that this frontend presents to engines (mutual TLS)"
    )
    engine_tls_client_key: Path | None = flag(
        None, path(), "private key of --engine-tls-client-cert (PEM, unencrypted)"
    )
    heartbeat_timeout_s: float = flag(
        3.0, number(2, 600),
        "seconds of silence after which an engine counts as lost and its requests move; raise it if hosts pause longer",
    )  # fmt: skip
    step_timeout_s: float = flag(
        300.0, number(0),
        "seconds without progress of an engine's step loop after which it counts as lost; must exceed the longest "
        "step. 0 disables",
    )  # fmt: skip
    failover_timeout_s: float = flag(
        30.0, number(0),
        "seconds that a request whose engine was lost waits for another engine; 0: only one that is attached takes it",
    )  # fmt: skip
    max_moves: int = flag(
        3, integer(0),
        "number of engines that a request may lose in a row without progress before it fails as a poison request",
    )  # fmt: skip

    max_queued_requests: int = flag(
        4096, integer(1), "maximum number of requests without a first token; further ones are refused at once",
        group="queue and streams",
    )  # fmt: skip
    max_queued_tokens: int = flag(
        1 << 20, integer(1), "maximum prompt tokens of these requests; lower it to bound the wait behind long prompts"
    )
    token_window: int = flag(
        256,
        integer(1, 2**31 - 1),
        "maximum tokens that an engine generates ahead of a client that reads slowly (backpressure)",
    )
    coalesce: bool = flag(
        True, switch(), "send tokens that are ready together in one message; off: one message per token, at more CPU"
    )
    stall_timeout_s: float = flag(
        60.0, number(0.001),
        "seconds after which a client that does not read its answer, or does not send its request, is disconnected",
    )  # fmt: skip
    # The default equals the timeout of OpenAI's clients.
    default_timeout_s: float = flag(
        600.0, number(0), "deadline in seconds of generations whose client sets none; 0: no deadline"
    )
    shutdown_timeout_s: float = flag(30.0, number(0), "seconds for running requests to finish after SIGTERM or SIGINT")
    unknown_parameters: str = flag(
        "warn", choice(("ignore", "warn", "refuse")),
        "handling of unknown parameters in HTTP bodies; ignore: drop them; warn: also name them in a response header "
        "and, at most once a minute, in the log; refuse: answer 400",
    )  # fmt: skip

    service_classes: Path | None = flag(
        None, path(),
        "TOML file with service classes: latency targets by name, which requests and API keys may refer to; see "
        "docs/scheduling.md", group="latency targets", default_text="none: requests may still set targets themselves",
    )  # fmt: skip
    retry_ticket_key_file: Path | None = flag(
        None, path(),
        "file with the secret, of 16 bytes or more, that signs the retry tickets of refusals; several workers or "
        "frontends need the same one", default_text="a random secret per process",
    )  # fmt: skip
    retry_horizon_s: float = flag(
        30.0, number(1, 600),
        "seconds from now within which a refused request may get a slot for its retry; later ones get no retry time",
    )  # fmt: skip
    trust_gateway_headers: bool = flag(
        False, switch(),
        "take the tenant from the header x-gateway-inference-fairness-id; only behind a gateway that sets it",
    )  # fmt: skip

    tokenizer: Path | None = flag(
        None, path(), "folder with the tokenizer's files", group="model", default_text="the engine sends them"
    )
    chat_template: Path | None = flag(
        None, path(), "file with a chat template in Jinja, instead of the model's", default_text="the model's"
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = flag(
        None, Kind(parse_json, are_template_kwargs, ALLOWED, "JSON"),
        "JSON object of variables for the chat template, such as '{\"enable_thinking\": false}'; those that a request "
        "sets take precedence",
    )  # fmt: skip
    tool_call_parser: str = flag(
        "auto", choice(TOOL_FORMATS),
        f"format of the model's tool calls: {', '.join(TOOL_FORMATS)}; auto: detected from the chat template",
    )  # fmt: skip
    reasoning_parser: str = flag(
        "auto", choice(REASONING_FORMATS),
        f"format of the model's reasoning: {', '.join(REASONING_FORMATS)}; auto: detected from the chat template",
    )  # fmt: skip
    grammar_timeout_s: float = flag(
        2.0, number(0.01, 60), "maximum CPU seconds to compile one structured-output schema or grammar"
    )
    grammar_memory_bytes: int = flag(
        512 << 20, integer(16 << 20), "maximum memory in bytes to compile one structured-output schema or grammar"
    )

    allow_runtime_lora_updating: bool = flag(
        False, switch(),
        "allow calls to load and unload LoRA adapters, in engines with --enable-lora and --lora-dir; on an address "
        "other than loopback they need --admin-api-key",
    )  # fmt: skip

    workers: int = flag(
        1, integer(1, 256),
        "processes that share the ports and the engines; raise it only if the frontend saturates a core",
        group="processes",
    )  # fmt: skip
    nice: int = flag(
        5, integer(0, 19),
        "nice value of the processes; above 0 an engine on the same cores runs first, and messages carry more tokens",
    )  # fmt: skip
    # Off: 64 streams, 2-core VM, 19 rounds of `loadgen.experiments endpoints`: CPU per token 0.92x through gRPC, 0.96x
    # through HTTP, single rounds from 0.66x to 1.21x; first tokens over HTTP come no sooner.
    uvloop: bool = flag(False, switch(), "run on uvloop instead of asyncio's event loop")

    log_level: str = flag(
        "info", choice(LOG_LEVELS), "lowest level that is logged to stderr", group="logs, metrics and traces"
    )
    log_format: str = flag(
        "text", choice(LOG_FORMATS), "text for people; json: one object per line, for log collectors"
    )
    log_stats_interval_s: float = flag(
        10.0, number(0), "seconds between throughput lines while there is traffic; 0 disables them"
    )
    log_requests: bool = flag(False, switch(), "log one line per finished request, without any of its text")
    log_prompts: bool = flag(False, switch(), "with --log-requests: include the beginning of each prompt")
    metrics_prefix: str = flag(
        "chairlift", choice(("chairlift", "vllm")), "prefix of metric names; vllm: works with vLLM's dashboards"
    )
    otlp_traces_endpoint: str = flag(
        "", text("a URL such as http://127.0.0.1:4318", _is_http_url, metavar="URL"),
        "URL of an OpenTelemetry collector that receives traces as OTLP over HTTP", default_text="no traces",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Checks all values and their combinations."""
        try:
            check_flags(self)
        except FlagError as error:
            raise ConfigError(str(error)) from None
        if self.workers > 1 and not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError(f"--workers is {self.workers}, it must be 1: this system has no SO_REUSEPORT")
        if self.workers > 1 and self.service_classes is not None and self.retry_ticket_key_file is None:
            raise ConfigError(
                f"--service-classes with --workers {self.workers} needs --retry-ticket-key-file: a worker's ticket "
                "may come back to another"
            )
        if not self.engine:
            raise ConfigError("--engine is empty, it must be HOST:PORT or unix:PATH")
        if self.log_prompts and not self.log_requests:
            raise ConfigError("--log-prompts needs --log-requests: it adds to its lines")
        if self.tokenizer is not None and not os.path.isdir(self.tokenizer):  # noqa: PTH112 - False if not readable
            raise ConfigError(f"--tokenizer is {self.tokenizer}, it must be a folder that this user can read")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: one is missing")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
        if (self.engine_tls_client_cert is None) != (self.engine_tls_client_key is None):
            raise ConfigError("--engine-tls-client-cert and --engine-tls-client-key belong together: one is missing")
        if self.engine_tls_client_cert is not None and self.engine_tls_ca is None:
            raise ConfigError("--engine-tls-client-cert needs --engine-tls-ca")
        self._check_exposure()
        self._check_administration()

    def _check_administration(self) -> None:
        """Refuses administration by everybody who may send requests from other machines."""
        if not self.allow_runtime_lora_updating or self.admin_api_key or self.admin_api_key_file is not None:
            return
        if not all(is_loopback(host) for host in (self.host, self.http_host or self.host)):
            raise ConfigError(
                "--allow-runtime-lora-updating on an address that is open to other machines needs --admin-api-key or "
                "--admin-api-key-file: who may send requests must not change the models"
            )

    def _check_exposure(self) -> None:
        """Refuses an unprotected port that other machines can reach."""
        has_key = bool(self.api_key) or self.api_key_file is not None or self.tls_client_ca is not None
        if self.insecure_bind or (self.tls_cert is not None and has_key):
            return
        hosts = {"--host": self.host} | ({"--http-host": self.http_host} if self.http and self.http_host else {})
        for name, host in hosts.items():
            if not is_loopback(host):
                raise ConfigError(
                    f"{name} {host or repr(host)} is open to other machines: add --tls-cert, --tls-key and an API key "
                    "(or --tls-client-ca), or --insecure-bind if something else protects it"
                )


def parse_arguments(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> FrontendConfig:
    """Parses a command line. An error ends the process with one line on stderr and status 2."""
    parser = FlagParser(
        "chairlift-frontend",
        description="Serves chairlift.v1 over gRPC, and OpenAI's and Anthropic's APIs over HTTP, in front of one or "
        "more engines. Each flag is also the environment variable in brackets; the command line overrides it. Counts "
        "accept the suffixes k, M and G.",
    )
    add_flags(parser, FrontendConfig)
    try:
        return config_from(parser.parse_args(argv), FrontendConfig, environ, error=ConfigError)
    except FlagError as error:
        parser.error(str(error))
