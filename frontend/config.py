"""The frontend's configuration: one frozen dataclass, and its flags and environment variables.

Knows nothing of the objects that are configured.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from chairlift.service.flags import (
    FlagError,
    FlagParser,
    add_flags,
    check_flags,
    choice,
    config_from,
    flag,
    integer,
    number,
    path,
    repeated,
    switch,
    text,
)
from chairlift.service.logs import LOG_FORMATS, LOG_LEVELS
from chairlift.service.tls import is_loopback
from frontend.errors import ConfigError
from frontend.text.chat import REASONING_FORMATS, TOOL_FORMATS

_ANY_HOST = text("an address", lambda _: True, metavar="HOST")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@*,]+")  # as browsers write it; they compare it letter by letter


def _is_address(address: str) -> bool:
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
        ConfigError: a value that cannot work; the message names the flag, the value and what is allowed.
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
    shutdown_timeout_s: float = 30.0
    grammar_timeout_s: float = 2.0
    grammar_memory_bytes: int = 512 << 20
    heartbeat_timeout_s: float = 3.0
    step_timeout_s: float = 300.0
    failover_timeout_s: float = 30.0
    max_moves: int = 3
    workers: int = 1
    reuse_port: bool = False
    reflection: bool = True
    nice: int = 5
    # Off: 64 streams, 2-core VM, 19 rounds of `loadgen.experiments endpoints`: CPU per token 0.92x through gRPC, 0.96x
    # through HTTP, single rounds from 0.66x to 1.21x; first tokens over HTTP come no sooner.
    uvloop: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    unknown_parameters: str = "warn"
    metrics_prefix: str = "chairlift"
    otlp_traces_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "text"
    log_stats_interval_s: float = 10.0
    log_requests: bool = False
    log_prompts: bool = False

    def __post_init__(self) -> None:
        """Checks each value, and what must fit together."""
        try:
            check_flags(self)
        except FlagError as error:
            raise ConfigError(str(error)) from None
        if self.workers > 1 and not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError(f"--workers is {self.workers}, it must be 1: this system has no SO_REUSEPORT")
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
    """Parses a command line. A mistake ends the process with one line on stderr and status 2."""
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
