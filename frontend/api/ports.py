"""Checks and reserves TCP ports before a server opens them, so that errors are one clear line."""

import socket

from frontend.config import FrontendConfig
from frontend.errors import ConfigError

HTTP_ADVICE = "choose another --http-port, or --no-http"
GRPC_ADVICE = "choose another --port"


def try_ports(config: FrontendConfig) -> None:
    """Opens and closes the ports, so that one error names all that cannot be had. That of gRPC is a page on stderr that
    does not name the cause.

    Raises:
        ConfigError: a port cannot be opened.
    """
    ports = [(config.host, config.port, GRPC_ADVICE)]
    if config.http:
        ports.append((config.http_host or config.host, config.http_port, HTTP_ADVICE))
    problems = []
    for host, port, advice in ports:
        try:
            open_port(host, port, reuse_port=config.reuse_port).close()
        except OSError as error:
            problems.append(str(cannot_listen(host, port, error, advice)))
    if problems:
        raise ConfigError("; ".join(problems))


def open_port(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Returns a socket that listens on the port; on `::` over IPv4 too, as gRPC does.

    Raises:
        OSError: the port cannot be opened.
    """
    is_dual = _is_dual(host)
    return socket.create_server((host, port), family=_family(host), reuse_port=reuse_port, dualstack_ipv6=is_dual)


def reserve_port(host: str, port: int, advice: str) -> socket.socket:
    """A socket that keeps the port for processes that share it, and takes no connections itself.

    Others that share it may listen there already: see `try_ports`.

    Args:
        host: where these will listen.
        port: 0 takes a free one.
        advice: what to do when it cannot be had.

    Raises:
        ConfigError: the port cannot be opened.
    """
    try:
        reserved = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if reserved.family == socket.AF_INET6:
                reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not _is_dual(host))
            reserved.bind((host, port))
        except OSError:
            reserved.close()
            raise
    except OSError as error:
        raise cannot_listen(host, port, error, advice) from error
    return reserved


def cannot_listen(host: str, port: int, error: Exception, advice: str) -> ConfigError:
    """Returns the error, without Python's repetition of the address."""
    reason = str(error.strerror).partition(" (")[0] if isinstance(error, OSError) else str(error)
    shown = f"[{host}]" if ":" in host else host
    return ConfigError(f"cannot listen on {shown}:{port}: {reason}; {advice}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_dual(host: str) -> bool:
    return host == "::" and socket.has_dualstack_ipv6()
