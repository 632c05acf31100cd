"""Starts and stops the servers that `ab` compares, one at a time, as described in a TOML file.

[a]
label = "static"
command = ["chairlift", "up", "--port", "50061", "--policy", "static"]   # or one text, split as a shell would
target = "grpc://127.0.0.1:50061"
ready = "http://127.0.0.1:9090/ready"    # or tcp:HOST:PORT or unix:PATH; without it, when the target can be reached
ready_timeout_s = 300                    # default 120
env = { OMP_NUM_THREADS = "2" }          # on top of ours
cwd = "."
stop_signal = "SIGINT"                   # default SIGTERM
stop_timeout_s = 60                      # default 30, then it is killed with all its children

[b]
...
"""

import os
import shlex
import signal
import socket
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadgen.direct_http import direct_opener
from loadgen.errors import OptionError, TargetError
from loadgen.processes import Process, wait_until

_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to start one server, and how to see that it is ready."""

    label: str
    command: tuple[str, ...]
    target: str
    ready: str
    ready_timeout_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 30.0


def read_servers(path: Path) -> tuple[ServerSpec, ServerSpec]:
    """Reads the file.

    Raises: OptionError: it cannot be read, or a key is missing, unknown or makes no sense; names them.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--servers {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"--servers {path}: is not TOML: {error}") from error
    if set(content) != {"a", "b"}:
        raise OptionError(f"--servers {path}: has {', '.join(sorted(content)) or 'nothing'}; must have [a] and [b]")
    return _server(path, "a", content["a"]), _server(path, "b", content["b"])


@contextmanager
def running(spec: ServerSpec, log: Path) -> Iterator[None]:
    """Runs the server in a block, which ends it and all its children.

    Args:
        spec: how to start it.
        log: gets what it prints; its folder exists.

    Raises: TargetError: it cannot be started, ends or is not ready in time, or something else is there already.
    """
    if _answers(spec.ready):
        raise TargetError(
            f"{spec.label}: something answers at {spec.ready} before the server was started; stop it first"
        )
    try:
        process = Process(
            spec.command,
            log,
            name=f"{spec.label}: the server",
            env={**os.environ, **spec.env},
            cwd=spec.cwd,
            stop_signal=spec.stop_signal,
            stop_timeout_s=spec.stop_timeout_s,
        )
    except OSError as error:
        raise TargetError(f"{spec.label}: {shlex.join(spec.command)}: {error.strerror or error}") from error
    try:
        wait_until(lambda: _answers(spec.ready), [process], spec.ready_timeout_s)
        yield
    finally:
        process.stop()


def _answers(ready: str) -> bool:
    if ready.startswith(("http://", "https://")):
        try:
            with direct_opener().open(ready, timeout=_CONNECT_TIMEOUT_S) as reply:
                return bool(200 <= reply.status < 300)
        except (OSError, ValueError, HTTPException):  # the last: it answers, but not in HTTP/1.1
            return False
    kind, _, address = ready.partition(":")
    try:
        if kind == "unix":
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_CONNECT_TIMEOUT_S)
                connection.connect(address)
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _server(path: Path, name: str, table: Any) -> ServerSpec:
    where = f"--servers {path}: [{name}]"
    kinds: dict[str, tuple[type, ...]] = {
        "label": (str,), "command": (str, list), "target": (str,), "ready": (str,), "ready_timeout_s": (int, float),
        "env": (dict,), "cwd": (str,), "stop_signal": (str,), "stop_timeout_s": (int, float),
    }  # fmt: skip
    if not isinstance(table, dict):
        raise OptionError(f"{where} must be a table")
    for key, value in table.items():
        if key not in kinds:
            raise OptionError(f"{where} {key} is not known; there are {', '.join(kinds)}")
        if not isinstance(value, kinds[key]) or isinstance(value, bool):
            raise OptionError(f"{where} {key} = {value!r} must be {' or '.join(kind.__name__ for kind in kinds[key])}")
    for key in ("command", "target"):
        if not table.get(key):
            raise OptionError(f"{where} {key} is missing")
    for key in ("ready_timeout_s", "stop_timeout_s"):
        if not table.get(key, 1) > 0:
            raise OptionError(f"{where} {key} = {table[key]} must be above 0")
    stop_signal = str(table.get("stop_signal", "SIGTERM"))
    if stop_signal not in signal.Signals.__members__:
        raise OptionError(f"{where} stop_signal = {stop_signal!r} is no signal")
    command = table["command"]
    return ServerSpec(
        label=table.get("label", name),
        command=tuple(shlex.split(command) if isinstance(command, str) else map(str, command)),
        target=table["target"],
        ready=_ready(where, table),
        env={key: str(value) for key, value in table.get("env", {}).items()},
        cwd=Path(table["cwd"]) if "cwd" in table else None,
        stop_signal=signal.Signals[stop_signal],
        **{key: float(table[key]) for key in ("ready_timeout_s", "stop_timeout_s") if key in table},
    )


def _ready(where: str, table: Mapping[str, Any]) -> str:
    """Returns the URL that shows readiness: as given, or from the target."""
    target = str(table["target"])
    ready = str(table.get("ready", ""))
    if not ready:
        scheme, _, address = target.partition(":")
        if scheme == "grpc+unix":
            return f"unix:{address.removeprefix('//')}"
        ready = f"tcp:{urlsplit(target).netloc}"
    if ready.startswith(("http://", "https://", "unix:")):
        return ready
    host, _, port = ready.removeprefix("tcp:").rpartition(":")
    if not ready.startswith("tcp:") or not host or not port.isdecimal():
        raise OptionError(f"{where} ready = {ready!r} must be http://..., tcp:HOST:PORT or unix:PATH")
    return ready
