"""Channels, API keys and TLS of both clients."""

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from chairlift.loopback import is_loopback

KEY_VARIABLE = "CHAIRLIFT_API_KEY"
DEFAULT_TARGET = "127.0.0.1:50051"
_MAX_TIMEOUT_S = 10 * 365 * 86_400.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # an answer is as large as its request allows, and would be lost
    ("grpc.max_reconnect_backoff_ms", 5_000),  # by default calls fail for two minutes after a server came back
)


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to a server. `Tls()` trusts gRPC's default CA certificates.

    Attributes:
        ca: file with the CA certificates to trust instead, PEM.
        cert, key: files with the client's certificate and its key, PEM, for servers that require one (mutual TLS).
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        """Checks that certificate and key are given together."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key belong together: one is missing")

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a channel.

        Raises:
            OSError: a file cannot be read.
        """
        return grpc.ssl_channel_credentials(_bytes(self.ca), _bytes(self.key), _bytes(self.cert))


def channel_options(target: str) -> tuple[tuple[str, int], ...]:
    """Returns the options of a channel to `target`, in gRPC's form.

    A proxy that the environment names (`grpc_proxy`, `https_proxy`, `http_proxy`) cannot reach this machine's loopback
    addresses; gRPC would ask it anyway, unless `no_proxy` lists them.
    """
    return (*_OPTIONS, ("grpc.enable_http_proxy", 0)) if _is_loopback(target) else _OPTIONS


def call_timeout_s(timeout_s: float | None) -> float | None:
    """Returns a timeout that gRPC can add to the time; it takes a sum that overflows for a deadline in the past."""
    return None if timeout_s is None else min(timeout_s, _MAX_TIMEOUT_S)


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call: the key, by default that of the environment, if there is one.

    Raises:
        ValueError: the key has characters that no header can carry.
    """
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    if not (key.isascii() and key.isprintable()):  # gRPC's own error would contain the key
        raise ValueError("the API key has other characters than printable ASCII")
    return (("authorization", f"Bearer {key}"),) if key else ()


def _is_loopback(target: str) -> bool:
    """Whether a target, such as `127.0.0.1:50051` or `ipv6:[::1]:50051`, is an address of this machine's loopback."""
    address = target.rpartition("/")[2]  # of dns:///HOST:PORT
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def _bytes(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
