"""Flags of the commands that call a server: where it is, and how to get in.

There is no flag for the key: everybody on the machine could read it off the command line.
"""

import argparse
import os

from chairlift import Tls
from chairlift.client.connection import DEFAULT_TARGET, KEY_VARIABLE


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --target and the flags of `tls_from_arguments`."""
    target = os.environ.get("CHAIRLIFT_TARGET") or DEFAULT_TARGET
    parser.add_argument(
        "--target", type=_address, default=target, help="the server [CHAIRLIFT_TARGET] (default: %(default)s)"
    )
    group = parser.add_argument_group("keys and TLS", f"The server's API key is taken from {KEY_VARIABLE}.")
    group.add_argument("--tls", action="store_true", help="speak TLS, and trust the usual authorities")
    group.add_argument("--tls-ca", metavar="FILE", help="speak TLS, and trust the certificates in this file")
    group.add_argument("--tls-cert", metavar="FILE", help="speak TLS, and show this certificate")
    group.add_argument("--tls-key", metavar="FILE", help="key of --tls-cert")


def _address(target: str) -> str:
    """A target as gRPC knows it: the form that chairlift-load takes is understood too."""
    scheme, separator, address = target.partition("://")
    if separator and scheme in ("http", "https", "grpcs"):
        with_tls = ", with --tls" if scheme == "grpcs" else ""
        raise argparse.ArgumentTypeError(f"{target} must be HOST:PORT or unix:PATH{with_tls}")
    return address if separator and scheme == "grpc" else target.removeprefix("grpc+")


def tls_from_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Tls | None:
    """What these flags say; a file that is of no use ends the process with one line and status 2."""
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
