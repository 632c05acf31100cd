"""How a client shows who it is, and checks who the server is."""

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

KEY_VARIABLE = "CHAIRLIFT_API_KEY"


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to a server. `Tls()` trusts whom gRPC trusts by default.

    Attributes:
        ca: file with the certificates to trust instead, PEM.
        cert, key: the client's own certificate and its key, PEM, for servers that want one (mTLS).
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        """Refuses half a pair."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key belong together: one is missing")

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel takes.

        Raises:
            OSError: a file cannot be read.
        """
        return grpc.ssl_channel_credentials(_bytes(self.ca), _bytes(self.key), _bytes(self.cert))


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of every call: the key, or that of the environment, if there is one.

    Raises:
        ValueError: no header can carry it.
    """
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    if not (key.isascii() and key.isprintable()):  # gRPC would complain later, and say the key
        raise ValueError("the API key has other characters than printable ASCII")
    return (("authorization", f"Bearer {key}"),) if key else ()


def _bytes(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
