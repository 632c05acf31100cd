"""The server's certificate, for both doors: gRPC wants the bytes, HTTP an SSLContext. It can be replaced while they
serve; connections keep the one they began with.
"""

import ssl
from pathlib import Path

import grpc

from frontend.config import FrontendConfig
from frontend.errors import ConfigError


class ServerTls:
    """What the doors open with. TLS 1.2 is the oldest spoken.

    Args:
        cert, key, client_ca: files, all PEM.

    Attributes:
        credentials: for gRPC.
        context: for HTTP.

    Raises:
        ConfigError: a file that cannot be read, is not PEM, or a key that is not the certificate's.
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
                raise ConfigError(f"--tls-client-ca {client_ca} holds no certificates in PEM") from error
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._next: grpc.ServerCertificateConfiguration | None = None  # what gRPC's next connection takes over
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
        """Reads the certificate and its key again, for connections to come. Which clients are trusted stays as it was.

        Raises:
            ConfigError: they are of no use; nothing has changed.
        """
        self._next = self._load()

    def _load(self) -> grpc.ServerCertificateConfiguration:
        cert, key = _read("--tls-cert", self._cert), _read("--tls-key", self._key)
        # First into a context of its own: what does not fit must not leave half of it in ours.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            try:
                context.load_cert_chain(self._cert, self._key, password="")  # "": an encrypted key must not ask
            except (ssl.SSLError, ValueError, OSError) as error:
                raise ConfigError(
                    f"--tls-cert {self._cert} and --tls-key {self._key} are no pair of a certificate and its "
                    f"unencrypted key, both PEM"
                ) from error
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=self._client_ca)

    def _take_next(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, in a thread of its own."""
        following, self._next = self._next, None
        return following


def load_tls(config: FrontendConfig) -> ServerTls | None:
    """Reads and checks the files, once for both doors; None: no TLS.

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
