"""The frontend's certificate towards engines, and whom it trusts to be one. Read again for every connection."""

import ssl
from pathlib import Path

import grpc

from frontend.config import FrontendConfig
from frontend.errors import ConfigError


class EngineTls:
    """What connections to engines are opened with.

    Args:
        ca: engines must show a certificate that these have signed.
        client_cert, client_key: what this frontend shows; None: nothing.

    Raises:
        ConfigError: a file that cannot be read, is not PEM, or a key that is not the certificate's.
    """

    def __init__(self, ca: Path, client_cert: Path | None, client_key: Path | None) -> None:
        self._ca = ca
        self._client_cert = client_cert
        self._client_key = client_key
        self.context()

    def context(self) -> ssl.SSLContext:
        """For a connection without gRPC.

        Raises:
            ConfigError: a file is of no use any more.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self._ca)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ConfigError(f"--engine-tls-ca {self._ca} holds no certificates in PEM, or cannot be read") from error
        if self._client_cert is not None and self._client_key is not None:
            try:
                context.load_cert_chain(
                    self._client_cert, self._client_key, password=""
                )  # an encrypted one must not ask
            except (ssl.SSLError, ValueError, OSError) as error:
                raise ConfigError(
                    f"--engine-tls-client-cert {self._client_cert} and --engine-tls-client-key {self._client_key} are "
                    "no pair of a certificate and its unencrypted key, both PEM"
                ) from error
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """For the next connection of gRPC.

        Raises:
            ConfigError: a file is of no use any more.
        """
        self.context()
        key = self._client_key.read_bytes() if self._client_key is not None else None
        cert = self._client_cert.read_bytes() if self._client_cert is not None else None
        return grpc.ssl_channel_credentials(self._ca.read_bytes(), key, cert)


def load_engine_tls(config: FrontendConfig) -> EngineTls | None:
    """Reads and checks the files; None: engines are spoken to in the clear.

    Raises:
        ConfigError: see EngineTls.
    """
    if config.engine_tls_ca is None:
        return None
    return EngineTls(config.engine_tls_ca, config.engine_tls_client_cert, config.engine_tls_client_key)
