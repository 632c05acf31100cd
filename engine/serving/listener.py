"""The engine's gRPC server: binds an address, serves an `EngineService`, stops."""

import asyncio
import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import grpc.aio

from chairlift.engine.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from chairlift.service.health import add_health
from engine.errors import ConfigError
from engine.serving.client_errors import ClientErrors
from engine.serving.server import EngineService

MAX_RECEIVE_BYTES = 64 << 20
MAX_UDS_PATH_BYTES = 107  # sockaddr_un.sun_path on Linux, less the final zero

_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", -1),
    # Makes a second engine on the same port fail to bind; otherwise each would get some of the streams.
    ("grpc.so_reuseport", 0),
    # Allow pings every few seconds, for which gRPC closes connections by default. It ignores `min_recv_ping_...`.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Detect a frontend whose machine is gone or suspended, since its requests hold blocks. A stopped frontend loses its
    # stream after 15.1 s with these, after more than 45 s without (grpcio 1.85).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)


class Listener:
    """Serves from `start` to `stop` on one event loop.

    Args:
        service: the service.
        address: "host:port" (port 0 selects a free one) or "unix:/path".
        credentials: TLS credentials; None: plaintext.
        interceptors: applied to every call.
        add_services: adds further services of the engine to the server.
    """

    def __init__(
        self,
        service: EngineService,
        address: str,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        add_services: Callable[[grpc.aio.Server], None] = lambda _: None,
    ) -> None:
        self._credentials = credentials
        self._service = service
        self._add_services = add_services
        self._server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=[ClientErrors(), *interceptors])
        self._heartbeat: asyncio.Task[None] | None = None
        self.address = address

    async def start(self) -> None:
        """Binds and starts to serve; `address` then has the selected port.

        Raises: ConfigError: the address cannot be bound.
        """
        add_EngineServiceServicer_to_server(self._service, self._server)
        self._add_services(self._server)
        add_health(self._service.health, self._server)
        self.address = _bind(self._server, self.address, self._credentials)
        await self._server.start()
        self._heartbeat = asyncio.create_task(self._service.send_heartbeats())

    async def failure(self) -> None:
        """Waits until the heartbeat task fails.

        Raises: Exception: that failure, a defect.
        """
        assert self._heartbeat is not None, "failure before start"
        await self._heartbeat

    async def stop(self, grace_s: float) -> None:
        """Ends open requests, lets streams send their messages for at most `grace_s`, then stops the server."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._service.finish("the engine stopped")
        await self._server.stop(grace_s)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    if address.startswith("unix:"):
        return _bind_unix_socket(server, Path(address.removeprefix("unix:")))
    host, _, wanted = address.rpartition(":")
    try:
        # Try to bind first: gRPC's own error is several lines on stderr without the cause.
        bare_host = host.strip("[]")
        family = socket.AF_INET6 if ":" in bare_host else socket.AF_INET
        socket.create_server((bare_host, int(wanted)), family=family).close()
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except (OSError, RuntimeError) as error:
        reason = str(error.strerror).partition(" (")[0] if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"cannot listen on {address}: {reason}; choose another --host or --port (0: any free port)"
        ) from error
    return f"{host}:{port}"


def _bind_unix_socket(server: grpc.aio.Server, path: Path) -> str:
    """Binds a socket that only this user can reach."""
    path = path.absolute()
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_UDS_PATH_BYTES:
        raise ConfigError(f"--uds {path} has {num_bytes} bytes, must have at most {MAX_UDS_PATH_BYTES}")
    try:
        _remove_stale_socket(path)
    except OSError as error:
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror}") from error
    previous_umask = os.umask(0o177)  # a chmod after bind would leave a gap
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on --uds {path}: {error}") from error
    finally:
        os.umask(previous_umask)
    return f"unix:{path}"


def _remove_stale_socket(path: Path) -> None:
    """Removes a stale socket; fails if a process listens on it.

    Raises:
        ConfigError: no socket can be there.
        OSError: the folder cannot be entered, or what is in the way can be neither dialled nor removed.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"--uds {path}: the folder {path.parent} does not exist")
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(f"--uds {path} exists and is not a socket")
        if _has_listener(path):
            raise ConfigError(f"--uds {path}: another process listens on it")
        path.unlink()


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True
