"""TLS to engines: the frontend's certificate and the trusted CA, read again for every connection."""

import ssl
from pathlib import Path

import grpc

from frontend.config import FrontendConfig
from frontend.errors import ConfigError


class EngineTls:
    """Credentials of connections to engines.

    Args:
        ca: file with the CA certificates that engines are verified with.
        client_cert, client_key: the frontend's own certificate; None: none.

    Raises:
        ConfigError: a file cannot be read or is not PEM, or the key does not match the certificate.
    """

    def __init__(self, ca: Path, client_cert: Path | None, client_key: Path | None) -> None:
        self._ca = ca
        self._client_cert = client_cert
        self._client_key = client_key
        self.context()

    def context(self) -> ssl.SSLContext:
        """Returns the context of a connection without gRPC.

        Raises:
            ConfigError: a file can no longer be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self._ca)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ConfigError(f"--engine-tls-ca {self._ca} contains no PEM certificates, or cannot be read") from error
        if self._client_cert is not None and self._client_key is not None:
            try:
                context.load_cert_chain(
                    self._client_cert, self._client_key, password=""
                )  # an encrypted key must not prompt
            except (ssl.SSLError, ValueError, OSError) as error:
                raise ConfigError(
                    f"--engine-tls-client-cert {self._client_cert} and --engine-tls-client-key {self._client_key} are "
                    "not a PEM certificate and its unencrypted key"
                ) from error
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of gRPC's next connection.

        Raises:
            ConfigError: a file can no longer be used.
        """
        self.context()
        key = self._client_key.read_bytes() if self._client_key is not None else None
        cert = self._client_cert.read_bytes() if self._client_cert is not None else None
        return grpc.ssl_channel_credentials(self._ca.read_bytes(), key, cert)


def load_engine_tls(config: FrontendConfig) -> EngineTls | None:
    """Reads and checks the files; returns None without TLS to engines.

    Raises:
        ConfigError: see EngineTls.
    """
    if config.engine_tls_ca is None:
        return None
    return EngineTls(config.engine_tls_ca, config.engine_tls_client_cert, config.engine_tls_client_key)
