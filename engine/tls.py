"""Mutual TLS between frontends and this engine: who may reach an address beyond this machine, with what certificate.

Certificates are read again when their files change, before the next connection; connections keep what they began with.
"""

import ipaddress
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio

from engine.config import EngineConfig
from engine.errors import ConfigError

_log = logging.getLogger(__name__)

_MAX_FRUITLESS = 2  # one may be a port scan, or a connection whose call is on its way
_SAY_EVERY_S = 60.0

_Q = TypeVar("_Q")
_A = TypeVar("_A")
_Stamp = tuple[tuple[int, int, int], ...]


def check_exposure(config: EngineConfig) -> None:
    """Refuses to serve other machines without mutual TLS: any peer could use the engine and fill its queue.

    Raises: ConfigError: the address is open, and neither certificates nor --insecure-bind are given.
    """
    files = {"--tls-cert": config.tls_cert, "--tls-key": config.tls_key, "--tls-client-ca": config.tls_client_ca}
    missing = [flag for flag, path in files.items() if path is None]
    if missing and len(missing) < len(files):
        raise ConfigError(f"--tls-cert, --tls-key and --tls-client-ca belong together: {' and '.join(missing)} missing")
    if config.uds is not None or config.insecure_bind or not missing or _is_loopback(config.host):
        return
    raise ConfigError(
        f"--host {config.host} is open to other machines: add --tls-cert, --tls-key and --tls-client-ca, so that only "
        "frontends with a certificate are served, or --insecure-bind if something else protects it"
    )


def server_credentials(config: EngineConfig, handshakes: "Handshakes") -> grpc.ServerCredentials | None:
    """What the engine listens with; None: in the clear, as on a unix socket.

    Args:
        config: names the files.
        handshakes: told of each that begins.

    Raises: ConfigError: a file cannot be read, or is of no use.
    """
    if config.uds is not None or config.tls_cert is None or config.tls_key is None or config.tls_client_ca is None:
        return None
    certificates = _Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)

    def before_handshake() -> grpc.ServerCertificateConfiguration | None:
        handshakes.begin(time.monotonic())
        return certificates.renewed()

    return grpc.dynamic_ssl_server_credentials(
        certificates.load(),
        before_handshake,  # type: ignore[arg-type]  # None: no change
        require_client_authentication=True,
    )


class Handshakes(grpc.aio.ServerInterceptor):
    """Says in the log that peers fail their TLS handshake. gRPC reports no failed one: handshakes without a following
    call are counted.
    """

    def __init__(self) -> None:
        """None has begun."""
        self._num_fruitless = 0
        self._said_at_s = float("-inf")

    def begin(self, now_s: float) -> None:
        """A peer has connected. Called on threads of gRPC's."""
        self._num_fruitless += 1
        if self._num_fruitless > _MAX_FRUITLESS and now_s - self._said_at_s >= _SAY_EVERY_S:
            self._said_at_s = now_s
            _log.warning(
                "%d connections have begun a TLS handshake, and none has made a call: a frontend shows no certificate "
                "that --tls-client-ca has signed, does not trust --tls-cert, or speaks no TLS; its log says which",
                self._num_fruitless,
            )

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Q, _A] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Q, _A] | None":
        """A call has come."""
        self._num_fruitless = 0
        return await continuation(handler_call_details)


class _Certificates:
    """The engine's certificate, and those that have signed its frontends'."""

    def __init__(self, cert: Path, key: Path, client_ca: Path) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._stamp: _Stamp | None = None

    def load(self) -> grpc.ServerCertificateConfiguration:
        """Reads and checks all files.

        Raises: ConfigError: they are of no use.
        """
        stamp = self._look()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password="")  # "": an encrypted key must not ask
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ConfigError(
                f"--tls-cert {self._cert} and --tls-key {self._key} are no pair of a certificate and its unencrypted "
                "key, both PEM"
            ) from error
        try:
            context.load_verify_locations(self._client_ca)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ConfigError(f"--tls-client-ca {self._client_ca} holds no certificates in PEM") from error
        self._stamp = stamp
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=self._client_ca.read_bytes())

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """What has changed on disk; None: nothing, or it is of no use. Called by gRPC before each handshake."""
        try:
            if self._look() == self._stamp:
                return None
            configuration = self.load()
        except (ConfigError, OSError) as error:
            _log.warning("TLS certificate: kept as before: %s", error)
            return None
        _log.info("TLS certificate: read again")
        return configuration

    def _look(self) -> _Stamp:
        """When the files were last written.

        Raises: ConfigError: one is not there.
        """
        try:
            stats = [path.stat() for path in (self._cert, self._key, self._client_ca)]
        except OSError as error:
            raise ConfigError(f"TLS: {error.filename} cannot be read: {error.strerror}") from error
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in stats)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
