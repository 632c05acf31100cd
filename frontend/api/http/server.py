"""Serves HTTP on the event loop of the gRPC server, with uvicorn's connections.

uvicorn's own server is not used: it handles signals, configures logging and polls every 0.1 s, so it stops slowly.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from email.utils import formatdate

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from frontend.api.http.connection import HEAD_TIMEOUT_S, HttpConnection
from frontend.api.http.listener import Listener
from frontend.api.ports import open_port

logger = logging.getLogger(__name__)

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
        self._tls = tls
        self._reuse_port = reuse_port
        self._stall_timeout_s = stall_timeout_s
        self._settle_s = settle_s
        self._config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # every malformed request is a warning
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._config.load()  # now, not with the first connection
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self._state = ServerState()
        self._listener: Listener | None = None
        self._date_task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Opens the port and serves.

        Raises:
            OSError: the port cannot be opened.
        """
        listener = open_port(*self._address, reuse_port=self._reuse_port)
        # Connections inherit it. asyncio sets it for sockets that name their protocol, which this one does not.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # for bytes still unsent when the application has timed out
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((self._stall_timeout_s + 10) * 1000))
        self.port = listener.getsockname()[1]
        self._date_task = asyncio.create_task(self._renew_date())
        listener.listen(self._config.backlog)
        self._listener = Listener(listener, self._new_connection, tls=self._tls, handshake_timeout_s=HEAD_TIMEOUT_S)

    def close_port(self) -> None:
        """Accepts no new connections; open ones continue."""
        if self._listener is not None:
            self._listener.close()

    async def wait_sent(self) -> None:
        """Waits until all written bytes have been sent."""
        while any(one.transport.get_write_buffer_size() for one in self._connections()):  # noqa: ASYNC110 - asyncio has no event
            await asyncio.sleep(_SENT_CHECK_S)

    async def stop(self) -> None:
        """Closes the port and all connections; cancels calls that do not end within `settle_s`."""
        if self._listener is None or self._date_task is None:
            return
        self._listener.close()
        self._date_task.cancel()
        for connection in self._connections():
            connection.shutdown()
        try:
            async with asyncio.timeout(self._settle_s):
                for connection in self._connections():
                    await connection.closed.wait()
                if self._state.tasks:
                    await asyncio.wait(self._state.tasks)
        except TimeoutError:
            logger.error("cancelled %d HTTP calls that did not end within %g s", len(self._state.tasks), self._settle_s)
            for task in self._state.tasks:
                task.cancel()

    def _new_connection(self) -> HttpConnection:
        return HttpConnection(self._config, self._state, app_state={})

    def _connections(self) -> Iterator[HttpConnection]:
        return (one for one in list(self._state.connections) if isinstance(one, HttpConnection))

    async def _renew_date(self) -> None:
        while True:
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            await asyncio.sleep(1.0)


def _is_news(record: logging.LogRecord) -> bool:
    """Drops uvicorn's record of an incomplete response: a client that stopped reading is logged by EventStream."""
    return record.msg != "ASGI callable returned without completing response."
