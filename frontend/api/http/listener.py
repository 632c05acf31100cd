"""Takes connections from a listening socket, and waits while this process has no file left for one.

asyncio's server would then try its whole backlog again and again, and log each attempt with a traceback: thousands a
second, so that nothing else is served.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

_ACCEPTS_PER_TURN = 128
_PAUSE_S = 1.0
_NO_FILE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

logger = logging.getLogger(__name__)


class Listener:
    """Serves each connection with a protocol of its own, until `close`.

    Args:
        listening: the socket; closed with this object.
        make_protocol: called for each connection.
        tls: None: plain TCP.
        handshake_timeout_s: most seconds of a TLS handshake.
    """

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s if tls is not None else None
        self._opening: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Takes no more connections; those that are open go on. May be called again."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
            self._listening.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_FILE:
                    raise
                logger.error("new connections wait: %s; raise the limit (ulimit -n)", error.strerror)
                self._loop.remove_reader(self._listening)
                self._pause = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._listening, self._accept)
                return
            task = self._loop.create_task(self._open(connection), name="http-connection")
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout_s
            )
        except OSError as error:  # as of a failed handshake
            logger.debug("a connection was not opened: %s", error)
