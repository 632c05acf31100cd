"""Describes failed connections for users, without internals of libraries and without raw bytes."""

import os

import aiohttp


def system_reason(error: OSError) -> str:
    """Returns the operating system's reason, without the text that a library added."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)  # name resolution has numbers of its own, below 0


def http_reason(error: aiohttp.ClientError) -> str:
    """Returns in one line why a call over HTTP failed."""
    name = type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"{name}: {system_reason(error.os_error)}"
    if isinstance(error, aiohttp.ClientResponseError):  # its text contains the received bytes
        return f"{name}: the answer is not HTTP/1.1"
    return f"{name}: {' '.join(str(error).split())[:200]}"


def http_complaint(error: aiohttp.ClientError, url: str) -> str:
    """Returns what to do about a server that cannot be reached over HTTP."""
    if isinstance(error, aiohttp.ClientSSLError):
        return f"{url} cannot be reached with TLS: write http:// for a server without TLS, or fix its certificate"
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = system_reason(error.os_error)
        return f"no server listens at {url} ({reason}): start the server, or check the address"
    if isinstance(error, aiohttp.ClientResponseError):
        return (
            f"{url} answers, but not in HTTP/1.1: it is a server of another protocol; if it speaks gRPC, write "
            f"--target grpc://{error.request_info.url.authority}"
        )
    return f"{url} does not speak HTTP as expected: {http_reason(error)}"
