"""Mutual TLS of the engine's port, which is required for addresses that other machines can reach.

Certificates are reloaded when their files change, before the next connection; open connections are not affected.
"""

import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio

from chairlift.loopback import is_loopback
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
    if config.uds is not None or config.insecure_bind or not missing or is_loopback(config.host):
        return
    raise ConfigError(
        f"--host {config.host} is open to other machines: add --tls-cert, --tls-key and --tls-client-ca, so that only "
        "frontends with a certificate are served, or --insecure-bind if something else protects it"
    )


def server_credentials(config: EngineConfig, handshakes: "Handshakes") -> grpc.ServerCredentials | None:
    """Returns the credentials of the port; None without TLS, as on a unix socket.

    Args:
        config: names the files.
        handshakes: counts each one that begins.

    Raises: ConfigError: a file cannot be read or used.
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
    """Logs that peers fail their TLS handshake. gRPC does not report that, so handshakes without a following call are
    counted.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self._num_fruitless = 0
        self._said_at_s = float("-inf")

    def begin(self, now_s: float) -> None:
        """Records a new connection; called on gRPC's threads."""
        self._num_fruitless += 1
        if self._num_fruitless > _MAX_FRUITLESS and now_s - self._said_at_s >= _SAY_EVERY_S:
            self._said_at_s = now_s
            _log.warning(
                "%d connections began a TLS handshake and made no call: a frontend presents no certificate signed by "
                "--tls-client-ca, does not trust --tls-cert, or does not use TLS; see its log",
                self._num_fruitless,
            )

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Q, _A] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[_Q, _A] | None":
        """Resets the count at each call."""
        self._num_fruitless = 0
        return await continuation(handler_call_details)


class _Certificates:
    """The engine's certificate, and the CA certificates of its frontends."""

    def __init__(self, cert: Path, key: Path, client_ca: Path) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._stamp: _Stamp | None = None

    def load(self) -> grpc.ServerCertificateConfiguration:
        """Reads and checks all files.

        Raises: ConfigError: a file cannot be used.
        """
        stamp = self._read_stamp()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password="")  # "": an encrypted key must not ask
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ConfigError(
                f"--tls-cert {self._cert} and --tls-key {self._key} are not a PEM certificate and its unencrypted key"
            ) from error
        try:
            context.load_verify_locations(self._client_ca)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ConfigError(f"--tls-client-ca {self._client_ca} contains no PEM certificates") from error
        self._stamp = stamp
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=self._client_ca.read_bytes())

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns changed certificates; None if there are none that can be used. gRPC calls it before handshakes."""
        try:
            if self._read_stamp() == self._stamp:
                return None
            configuration = self.load()
        except (ConfigError, OSError) as error:
            _log.warning("TLS certificate not reloaded, the old one stays in use: %s", error)
            return None
        _log.info("TLS certificate reloaded")
        return configuration

    def _read_stamp(self) -> _Stamp:
        """Returns when the files were last written.

        Raises: ConfigError: a file is missing.
        """
        try:
            stats = [path.stat() for path in (self._cert, self._key, self._client_ca)]
        except OSError as error:
            raise ConfigError(f"TLS: {error.filename} cannot be read: {error.strerror}") from error
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in stats)
