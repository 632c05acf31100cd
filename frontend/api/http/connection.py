"""HTTP connections with a timeout for request heads, which uvicorn lacks.

Uses h11 because it is the one of uvicorn's two parsers that limits the size of headers.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from frontend.api.http.errors import BodyError, error_response
from frontend.api.http.strict_http import StrictConnection

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 << 10
_MAX_REASON_CHARS = 200


class HttpConnection(H11Protocol):
    """Closes itself when the head of a request is not complete within HEAD_TIMEOUT_S.

    The timer starts with the connection, later with the first byte after a response; uvicorn's keep-alive timeout
    applies in between.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: StrictConnection = StrictConnection(MAX_HEAD_BYTES)
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def data_received(self, data: bytes) -> None:
        """Starts the timer with the first byte of a head, and stops it with the last."""
        if self.transport.is_closing():  # TLS hands over what it still had
            return
        super().data_received(data)
        if not self._awaits_head:
            self._stop_timer()
        elif self.transport.is_closing():
            return
        elif self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # These were the last bytes of a request that was refused before them. uvicorn forgets to wait again.
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP, or ambiguous, with an error and closes the connection. A request whose body
        they belong to is aborted.
        """
        if not self._awaits_head:
            self._abort_request()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else its answer has begun
            self._refuse(self.conn.refusal or h11.RemoteProtocolError(msg))
        self.transport.close()

    def shutdown(self) -> None:
        """Closes the connection, after its answer if it owes one. A request whose body is incomplete gets none: it
        would be refused, and the rest of it may never arrive.
        """
        if not self._awaits_head and self.conn.their_state is h11.SEND_BODY:
            self._abort_request()
            self.transport.close()
        else:
            super().shutdown()

    def _refuse(self, refusal: h11.RemoteProtocolError) -> None:
        status = refusal.error_status_hint
        response = error_response(BodyError(status, f"malformed HTTP: {refusal}"[:_MAX_REASON_CHARS]))
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer and sets `closed`."""
        self._stop_timer()
        super().connection_lost(exc)
        self.closed.set()

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _abort_request(self) -> None:
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def _close(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
