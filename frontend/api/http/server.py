"""Runs uvicorn on the event loop of the gRPC server.

uvicorn's process-wide features are off: no signal handlers, no logging configuration.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from frontend.api.http.connection import HttpConnection

_KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that none is closed under a new request
_SENT_CHECK_S = 0.02


class HttpServer:
    """Serves one ASGI application.

    Args:
        app: the application.
        host, port: where to listen; port 0 takes a free one.
        tls: TLS context; None: plain HTTP.
        reuse_port: share the port with other processes.
        stall_timeout_s: seconds that a client may leave written bytes unread.
        settle_s: seconds that calls may take to end once the server stops.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        reuse_port: bool,
        stall_timeout_s: float,
        settle_s: float,
    ) -> None:
        self._address = (host, port)
        self._reuse_port = reuse_port
        self._stall_timeout_s = stall_timeout_s
        config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # every malformed request is a warning
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(settle_s)),
        )
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        config.load()  # now, because it would overwrite the TLS context later
        config.ssl = tls
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    def start(self) -> None:
        """Opens the port and serves.

        Raises:
            OSError: the port cannot be opened.
        """
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.create_server(self._address, family=family, reuse_port=self._reuse_port)
        # Connections inherit it. asyncio sets it for sockets that name their protocol, which this one does not.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # for bytes still unsent when the application has timed out
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((self._stall_timeout_s + 10) * 1000))
        self.port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listener]))

    async def wait_sent(self) -> None:
        """Waits until all written bytes have been sent."""
        while any(one.transport.get_write_buffer_size() for one in self._server.connections()):  # noqa: ASYNC110 - tells nobody
            await asyncio.sleep(_SENT_CHECK_S)

    async def stop(self) -> None:
        """Closes the port and all connections; cancels calls that do not end within `settle_s`."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task


def _is_news(record: logging.LogRecord) -> bool:
    """Drops uvicorn's record of an incomplete response: a client that stopped reading is logged by EventStream."""
    return record.msg != "ASGI callable returned without completing response."


class _Server(uvicorn.Server):
    def connections(self) -> list[HttpConnection]:
        return [one for one in self.server_state.connections if isinstance(one, HttpConnection)]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers: the process has its own."""
        yield
