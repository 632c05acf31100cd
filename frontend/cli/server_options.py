"""Flags of the commands that call a server: its address, and TLS.

The API key has no flag, because all users of the machine can read command lines.
"""

import argparse
import os

from chairlift import Tls
from chairlift.client.connection import DEFAULT_TARGET, KEY_VARIABLE
from chairlift.service.flag_kinds import Kind

_MAX_WAIT_S = 1_000_000
WAIT = Kind(float, lambda s: 0 < s <= _MAX_WAIT_S, f"above 0 and at most {_MAX_WAIT_S:,} seconds", "S")
"""Seconds of --timeout."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --target and the flags of `tls_from_arguments`."""
    target = os.environ.get("CHAIRLIFT_TARGET") or DEFAULT_TARGET
    parser.add_argument(
        "--target",
        type=_address,
        default=target,
        help="address of the server, HOST:PORT or unix:PATH (default: %(default)s) [CHAIRLIFT_TARGET]",
    )
    group = parser.add_argument_group("keys and TLS", f"The API key is read from {KEY_VARIABLE}.")
    group.add_argument("--tls", action="store_true", help="use TLS and trust the default CA certificates")
    group.add_argument("--tls-ca", metavar="FILE", help="use TLS and trust the CA certificates in this file (PEM)")
    group.add_argument("--tls-cert", metavar="FILE", help="use TLS and present this certificate (PEM), for mutual TLS")
    group.add_argument("--tls-key", metavar="FILE", help="private key of --tls-cert (PEM, unencrypted)")


def _address(target: str) -> str:
    """Returns a target in gRPC's form; also accepts the form that chairlift-loadgen takes."""
    scheme, separator, address = target.partition("://")
    if separator and scheme in ("http", "https", "grpcs"):
        with_tls = ", with --tls" if scheme == "grpcs" else ""
        raise argparse.ArgumentTypeError(f"{target} must be HOST:PORT or unix:PATH{with_tls}")
    if not target:
        raise argparse.ArgumentTypeError("is empty, it must be HOST:PORT or unix:PATH")
    return address if separator and scheme == "grpc" else target.removeprefix("grpc+")


def tls_from_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Tls | None:
    """Returns the TLS settings; a file that cannot be used ends the process with one line and status 2."""
    files = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    if not arguments.tls and files == (None, None, None):
        return None
    try:
        tls = Tls(*files)
        tls.credentials()
    except ValueError:
        parser.error("--tls-cert and --tls-key belong together: one is missing")
    except OSError as error:
        parser.error(f"{error.filename} cannot be read: {error.strerror}")
    return tls
