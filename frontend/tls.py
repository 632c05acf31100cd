"""The server's certificate, for both doors: gRPC wants the bytes, HTTP an SSLContext."""

import ssl
from pathlib import Path
from typing import NamedTuple

import grpc

from frontend.config import FrontendConfig
from frontend.errors import ConfigError


class ServerTls(NamedTuple):
    """What the doors open with."""

    credentials: grpc.ServerCredentials
    context: ssl.SSLContext


def load_tls(config: FrontendConfig) -> ServerTls | None:
    """Reads and checks the files, once for both doors; None: no TLS. TLS 1.2 is the oldest spoken.

    Raises:
        ConfigError: a file that cannot be read, is not PEM, or a key that is not the certificate's.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert, key = _read("--tls-cert", config.tls_cert), _read("--tls-key", config.tls_key)
    client_ca = _read("--tls-client-ca", config.tls_client_ca) if config.tls_client_ca else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")  # "": an encrypted key must not ask
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key} are no pair of a certificate and its "
            f"unencrypted key, both PEM"
        ) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"--tls-client-ca {config.tls_client_ca} holds no certificates in PEM") from error
        context.verify_mode = ssl.CERT_REQUIRED
    credentials = grpc.ssl_server_credentials(
        [(key, cert)], root_certificates=client_ca, require_client_auth=client_ca is not None
    )
    return ServerTls(credentials, context)


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
