"""The server's certificate for gRPC (as bytes) and HTTP (as an SSLContext).

It can be replaced while the server runs; open connections are not affected.
"""

import ssl
from pathlib import Path

import grpc

from frontend.config import FrontendConfig
from frontend.errors import ConfigError


class ServerTls:
    """TLS settings of both ports. The oldest version is TLS 1.2.

    Args:
        cert, key, client_ca: files, all PEM.

    Attributes:
        credentials: for gRPC.
        context: for HTTP.

    Raises:
        ConfigError: a file cannot be read or is not PEM, or the key does not match the certificate.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = _read("--tls-client-ca", client_ca) if client_ca else None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if client_ca is not None:
            try:
                self.context.load_verify_locations(client_ca)
            except (ssl.SSLError, ValueError) as error:
                raise ConfigError(f"--tls-client-ca {client_ca} contains no PEM certificates") from error
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._next: grpc.ServerCertificateConfiguration | None = None  # for new gRPC connections
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._load(),
            self._take_next,  # type: ignore[arg-type]  # None: no change
            require_client_authentication=client_ca is not None,
        )

    @property
    def paths(self) -> tuple[Path, Path]:
        """The files that `reload` reads."""
        return self._cert, self._key

    def reload(self) -> None:
        """Reloads certificate and key for new connections. The CA certificates of clients do not change.

        Raises:
            ConfigError: a file cannot be used; nothing has changed.
        """
        self._next = self._load()

    def _load(self) -> grpc.ServerCertificateConfiguration:
        cert, key = _read("--tls-cert", self._cert), _read("--tls-key", self._key)
        # First into another context: a certificate without its matching key must not replace half of the current pair.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            try:
                context.load_cert_chain(self._cert, self._key, password="")  # "": an encrypted key must not prompt
            except (ssl.SSLError, ValueError, OSError) as error:
                raise ConfigError(
                    f"--tls-cert {self._cert} and --tls-key {self._key} are not a PEM certificate and its "
                    f"unencrypted key"
                ) from error
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=self._client_ca)

    def _take_next(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, on one of its threads."""
        following, self._next = self._next, None
        return following


def load_tls(config: FrontendConfig) -> ServerTls | None:
    """Reads and checks the files; returns None without TLS.

    Raises:
        ConfigError: see ServerTls.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    return ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
