"""Describes a failed call in one line."""

import grpc

from chairlift import GenerationError
from chairlift.client.connection import DEFAULT_TARGET, KEY_VARIABLE


def error_line(error: GenerationError, target: str) -> str:
    """Returns the error and, if known, what to do."""
    line = " ".join(str(error).split())
    if error.retry_delay_s is not None:
        return f"{line} (try again in {error.retry_delay_s:.1f} s)"
    if error.status is grpc.StatusCode.UNAUTHENTICATED:
        return f"{line} (put one of the server's keys into {KEY_VARIABLE})"
    if error.status is grpc.StatusCode.UNAVAILABLE and not error.reason:  # grpc's own message
        return f"{line} ({_guess(line, target)})"
    return line


def _guess(line: str, target: str) -> str:
    if "handshake" in line:
        return f"does the server at {target} use TLS, and do --tls-ca and --tls-cert match it?"
    if "errors resolving" in line:
        return f"unknown host: is {target} the HOST:PORT or unix:PATH of a server?"
    if "http1.x" in line or "Failed parsing HTTP/2" in line:
        return f"{target} is an HTTP port; gRPC is usually on {DEFAULT_TARGET.rpartition(':')[2]}"
    if "failed to connect" not in line:
        return "the connection broke: the server or the network failed"
    if "Socket closed" in line or "Connection reset" in line:
        return f"does the server at {target} require TLS? Try --tls or --tls-ca; for mutual TLS also --tls-cert"
    return f"no server at {target}? `chairlift up` starts one"
