"""Flags of the frontend: one frozen dataclass, from which the command line and the environment variables are made.

Every field is the flag of its name (`max_queued_requests` -> `--max-queued-requests`, times without their unit) and the
variable `CHAIRLIFT_<FLAG>`; a flag wins over its variable. Knows nothing of the objects that are configured.
"""

import argparse
import difflib
import ipaddress
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from chairlift.service.logs import LOG_FORMATS, LOG_LEVELS
from frontend.errors import ConfigError
from frontend.text.chat import REASONING_FORMATS, TOOL_FORMATS

MIN_HEARTBEAT_TIMEOUT_S = 2.0
MIN_GRAMMAR_MEMORY_BYTES = 16 << 20
MAX_WORKERS = 256
_UNKNOWN_PARAMETERS = ("ignore", "warn", "refuse")
_METRICS_PREFIXES = ("chairlift", "vllm")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@*,]+")  # as browsers write it, who compare it letter by letter
_OWN_METAVARS = {"allowed_origins": "ORIGIN", "api_key": "KEY", "engine": "ADDRESS", "unknown_parameters": "POLICY"}
_METAVARS = {int: "N", float: "S", Path: "PATH"}  # every float is a time

_HELP = {
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one",
    "http": "serve OpenAI's and Anthropic's APIs over HTTP too",
    "http_host": "address to listen on for HTTP; empty: as --host",
    "http_port": "port to listen on for HTTP; 0 takes a free one",
    "allowed_origins": "web page origins that may call over HTTP from a browser, such as https://example.org; * allows "
    "all; may be repeated (the variable: separated by commas)",
    "api_key": "a key that calls must carry; may be repeated; everybody on this machine can read a flag, so better the "
    "variable or the file",
    "api_key_file": "file with such keys, one in a line",
    "tls_cert": "certificate chain, PEM; both doors then speak TLS alone",
    "tls_key": "its key, PEM, not encrypted",
    "tls_client_ca": "certificates, PEM; clients must show one that these have signed",
    "insecure_bind": "take a --host beyond this machine without TLS and a key",
    "engine": "address of an engine: HOST:PORT or unix:PATH; may be repeated (the variable: separated by commas); a "
    "name stands for all of its addresses, and is looked up again and again",
    "engine_tls_ca": "certificates, PEM; engines, except on unix sockets, must show one that these have signed",
    "engine_tls_client_cert": "certificate chain, PEM, that this frontend shows to engines",
    "engine_tls_client_key": "its key, PEM, not encrypted",
    "tokenizer": "folder with the tokenizer's files; without it they come from the engine",
    "max_queued_requests": "most requests that may wait for their first token",
    "max_queued_tokens": "most prompt tokens that may wait to be computed",
    "token_window": "most tokens an engine may generate ahead of a client's reading",
    "coalesce": "let tokens that are there together leave in one message; without, every token has its own",
    "stall_timeout_s": "seconds after which a client that does not read its answer is cut off",
    "default_timeout_s": "seconds that a generation may take whose client names no deadline; 0: any time",
    "shutdown_timeout_s": "seconds that running requests get to finish on SIGTERM or SIGINT",
    "grammar_timeout_s": "most seconds of CPU time that compiling the form of an answer (a schema, a grammar) may take",
    "grammar_memory_bytes": "most bytes of memory that compiling one may take",
    "heartbeat_timeout_s": "seconds without a message after which the engine counts as gone",
    "step_timeout_s": "seconds for which an engine's step loop may stand still before it counts as gone; 0: any number",
    "failover_timeout_s": "seconds that a request whose engine is gone waits for another; 0: none",
    "max_moves": "most engines in a row that a request may lose without getting further; then it fails",
    "workers": "processes that share the ports and the engine; more than 1 helps only where one takes all of a core",
    "reuse_port": "share the port with other frontend processes (SO_REUSEPORT)",
    "reflection": "serve gRPC server reflection",
    "nice": "yield the CPU to an engine on the same cores: 0 to 19; tokens then travel in fewer messages",
    "uvloop": "run on uvloop",
    "tool_call_parser": f"form of the model's tool calls: one of {', '.join(TOOL_FORMATS)}",
    "reasoning_parser": f"marks of the model's reasoning: one of {', '.join(REASONING_FORMATS)}",
    "unknown_parameters": "what to do with unknown parameters of HTTP bodies: ignore them; warn: ignore them, but name "
    "them in a response header and, at most once a minute, in the log; refuse: answer 400",
    "metrics_prefix": f"what the names of metrics begin with: one of {', '.join(_METRICS_PREFIXES)}",
    "otlp_traces_endpoint": "URL of an OpenTelemetry collector that gets traces, as OTLP over HTTP; empty: none",
    "log_level": f"one of {', '.join(LOG_LEVELS)}",
    "log_format": f"one of {', '.join(LOG_FORMATS)}; json: one object per line",
    "log_stats_interval_s": "seconds between two lines of throughput while there is traffic; 0: none",
    "log_requests": "log one line for each request when it has ended, without any text of it",
    "log_prompts": "with --log-requests: the beginning of its prompt too",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Everything that can be set; checked when created.

    Raises:
        ConfigError: a value that cannot work; the message names the flag, the value and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    http: bool = True
    http_host: str = ""
    http_port: int = 8000
    allowed_origins: tuple[str, ...] = ()
    api_key: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    insecure_bind: bool = False
    engine: tuple[str, ...] = ("127.0.0.1:50052",)
    engine_tls_ca: Path | None = None
    engine_tls_client_cert: Path | None = None
    engine_tls_client_key: Path | None = None
    tokenizer: Path | None = None
    max_queued_requests: int = 4096
    max_queued_tokens: int = 1 << 20
    token_window: int = 256
    coalesce: bool = True
    stall_timeout_s: float = 60.0
    default_timeout_s: float = (
        600.0  # what OpenAI's clients wait, and how long a closing connection waits for its streams
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
    # Off: 64 streams, 2-core VM, 19 rounds of `engine.bench doors`: CPU per token 0.92x through gRPC, 0.96x through
    # HTTP, single rounds from 0.66x to 1.21x; first tokens over HTTP come no sooner.
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
        """Checks every range."""
        for origin in self.allowed_origins:
            allowed = "* or an origin such as https://example.org, without a path"
            _check(_is_origin(origin), "allowed_origins", origin, allowed)
        for name in ("port", "http_port"):
            _check(0 <= getattr(self, name) <= 65535, name, getattr(self, name), "between 0 and 65535")
        _check(0 <= self.nice <= 19, "nice", self.nice, "between 0 and 19")
        _check(1 <= self.workers <= MAX_WORKERS, "workers", self.workers, f"between 1 and {MAX_WORKERS}")
        if not hasattr(socket, "SO_REUSEPORT"):
            _check(self.workers == 1, "workers", self.workers, "1: this system cannot share a port (SO_REUSEPORT)")
        _check(bool(self.engine), "engine", "empty", "HOST:PORT or unix:PATH")
        for address in self.engine:
            _check(_is_address(address), "engine", address, "HOST:PORT or unix:PATH")
        _check(self.max_moves >= 0, "max_moves", self.max_moves, "at least 0")
        for name in ("max_queued_requests", "max_queued_tokens", "token_window"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _check(0 < self.stall_timeout_s < float("inf"), "stall_timeout_s", self.stall_timeout_s, "more than 0 seconds")
        at_least_0 = ("shutdown_timeout_s", "default_timeout_s", "step_timeout_s", "failover_timeout_s")
        for name in (*at_least_0, "log_stats_interval_s"):
            _check(0 <= getattr(self, name) < float("inf"), name, getattr(self, name), "at least 0 seconds")
        _check(0.01 <= self.grammar_timeout_s <= 60, "grammar_timeout_s", self.grammar_timeout_s, "0.01 to 60 seconds")
        least, memory_bytes = MIN_GRAMMAR_MEMORY_BYTES, self.grammar_memory_bytes
        _check(least <= memory_bytes, "grammar_memory_bytes", memory_bytes, f"at least {least}")
        low, high = MIN_HEARTBEAT_TIMEOUT_S, 600.0
        timeout_s = self.heartbeat_timeout_s
        _check(low <= timeout_s <= high, "heartbeat_timeout_s", timeout_s, f"between {low:g} and {high:g} seconds")
        for name, known in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
            _check(getattr(self, name) in known, name, getattr(self, name), f"one of {', '.join(known)}")
        policies, policy = ", ".join(_UNKNOWN_PARAMETERS), self.unknown_parameters
        _check(policy in _UNKNOWN_PARAMETERS, "unknown_parameters", policy, f"one of {policies}")
        prefixes = ", ".join(_METRICS_PREFIXES)
        _check(self.metrics_prefix in _METRICS_PREFIXES, "metrics_prefix", self.metrics_prefix, f"one of {prefixes}")
        _check(self.log_level in LOG_LEVELS, "log_level", self.log_level, f"one of {', '.join(LOG_LEVELS)}")
        _check(self.log_format in LOG_FORMATS, "log_format", self.log_format, f"one of {', '.join(LOG_FORMATS)}")
        if self.log_prompts and not self.log_requests:
            raise ConfigError("--log-prompts needs --log-requests: it adds to its lines")
        url = self.otlp_traces_endpoint
        _check(not url or _is_http_url(url), "otlp_traces_endpoint", url, "a URL such as http://127.0.0.1:4318")
        folder = self.tokenizer
        is_there = folder is None or os.path.isdir(folder)  # noqa: PTH112 - False where this user may not look
        _check(is_there, "tokenizer", folder, "a folder that exists, and that this user may enter")
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
        """Nobody opens a port to a network by mistake."""
        has_key = bool(self.api_key) or self.api_key_file is not None or self.tls_client_ca is not None
        if self.insecure_bind or (self.tls_cert is not None and has_key):
            return
        for name in ("host", "http_host") if self.http and self.http_host else ("host",):
            host = getattr(self, name)
            if not _is_loopback(host):
                raise ConfigError(
                    f"--{_flag_name(name)} {host or repr(host)} is open to other machines: add --tls-cert, --tls-key "
                    "and an API key (or --tls-client-ca), or --insecure-bind if something else protects it"
                )


def add_arguments(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ, *, unlisted: Collection[str] = ()
) -> None:
    """Adds one flag per field of FrontendConfig, its default taken from the environment where that has a value.

    Fields in `unlisted` are left out of the help.
    """
    for option in fields(FrontendConfig):
        name = _flag_name(option.name)
        variable = _variable(name)
        default = environ.get(variable) or option.default  # an empty variable counts as unset
        text = f"{_HELP[option.name]} [{variable}]"
        listed = option.name not in unlisted
        if isinstance(option.default, tuple):
            if isinstance(default, str):
                default = (default,) if option.name == "api_key" else tuple(default.split(","))
            parser.add_argument(
                f"--{name}",
                dest=option.name,
                default=default,
                metavar=_OWN_METAVARS[option.name],
                action=_Repeated,
                help=text if listed else argparse.SUPPRESS,
            )
        elif isinstance(option.default, bool):
            if isinstance(default, str):
                default = _to_bool(parser, variable, default)
            parser.add_argument(
                f"--{name}",
                dest=option.name,
                default=default,
                help=f"{text} (default: {'on' if default else 'off'})",
                action=argparse.BooleanOptionalAction,
            )
        else:
            kind = _kind(option)
            if default not in (None, ""):
                text += " (default: %(default)s)"
            if variable in environ and isinstance(default, str):
                default = _converted(parser, variable, default, kind)
            parser.add_argument(
                f"--{name}",
                dest=option.name,
                default=default,
                type=kind,
                metavar=_OWN_METAVARS.get(option.name) or _METAVARS.get(kind) or name.rpartition("-")[2].upper(),
                help=text if listed else argparse.SUPPRESS,
            )


def config_from_arguments(arguments: argparse.Namespace) -> FrontendConfig:
    """The config that the flags of `add_arguments` say.

    Raises:
        ConfigError: see FrontendConfig.
    """
    return FrontendConfig(**{option.name: getattr(arguments, option.name) for option in fields(FrontendConfig)})


def parse_arguments(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> FrontendConfig:
    """Parses a command line. A mistake ends the process with one line on stderr and status 2."""
    parser = OneLineParser(
        prog="chairlift-frontend",
        description="Serves chairlift.v1, and OpenAI's and Anthropic's APIs, in front of an engine. Every flag is an "
        "environment variable too, named in brackets; the command line wins.",
    )
    add_arguments(parser, environ)
    try:
        return config_from_arguments(parser.parse_args(argv))
    except ConfigError as error:
        parser.error(with_source(str(error), argv, environ))


def with_source(complaint: str, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """A complaint about a flag; names the variable too if that is where the value came from."""
    flag = complaint.partition(" ")[0]
    variable = _variable(flag.removeprefix("--"))
    if not environ.get(variable) or any(word == flag or word.startswith(f"{flag}=") for word in argv):
        return complaint
    return f"{complaint} (from {variable})"


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        """Prints the complaint and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As usual; what is unknown is refused with the flag that may have been meant."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("--")]
            known = [name for action in self._actions for name in action.option_strings]
            near = [name for flag in flags for name in difflib.get_close_matches(flag, known, 1, 0.7)]
            meant = f"; did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
            self.error(f"unknown: {' '.join(unknown)}{meant}")
        return options


class _Repeated(argparse.Action):
    """Collects the values of a flag; the first takes the default's place."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's form
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        """Adds one."""
        collected = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (values,) if collected is self.default else (*collected, values))


def _flag_name(field_name: str) -> str:
    return field_name.removesuffix("_s").replace("_", "-")


def _variable(flag_name: str) -> str:
    return "CHAIRLIFT_" + flag_name.upper().replace("-", "_")


def _converted(parser: argparse.ArgumentParser, variable: str, value: str, kind: type) -> object:
    try:
        return kind(value)
    except ValueError:
        parser.error(f"{variable} is {value!r}, it must be a {'whole ' if kind is int else ''}number")


def _kind(option: Field[Any]) -> type:
    return Path if option.default is None else type(option.default)


def _to_bool(parser: argparse.ArgumentParser, variable: str, value: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if value.lower() not in words:
        parser.error(f"{variable} is {value!r}, it must be one of {', '.join(words)}")
    return words[value.lower()]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_address(address: str) -> bool:
    if address.startswith("unix:"):
        return len(address) > len("unix:")
    host, colon, port = address.removeprefix("dns:").rpartition(":")
    return bool(host and colon and port.isascii() and port.isdigit() and 0 < int(port) <= 65535)


def _is_origin(text: str) -> bool:
    return text == "*" or _ORIGIN.fullmatch(text) is not None


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False


def _check(condition: bool, field_name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"--{_flag_name(field_name)} is {value}, it must be {allowed}")
