"""TLS settings of a target in the forms that gRPC and aiohttp take."""

import ssl
from pathlib import Path

import grpc

from loadgen.errors import TargetError
from loadgen.target.base import TargetSpec


def grpc_credentials(spec: TargetSpec) -> grpc.ChannelCredentials | None:
    """Returns the credentials of a grpcs target; None: the target does not use TLS.

    Raises: TargetError: a file cannot be read.
    """
    if not spec.url.startswith("grpcs:"):
        return None
    ca, key, cert = (None if path is None else _read(path) for path in (spec.tls_ca, spec.tls_key, spec.tls_cert))
    return grpc.ssl_channel_credentials(ca, key, cert)


def ssl_context(spec: TargetSpec) -> ssl.SSLContext:
    """Returns the TLS context of an https target.

    Raises: TargetError: a file cannot be read or used.
    """
    try:
        context = ssl.create_default_context(cafile=spec.tls_ca)
        if spec.tls_cert is not None:
            context.load_cert_chain(spec.tls_cert, spec.tls_key, password="")  # "": an encrypted key must not prompt
    except (OSError, ValueError) as error:
        raise TargetError(f"--tls-ca, --tls-cert or --tls-key cannot be used: {error}") from error
    return context


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}") from error
