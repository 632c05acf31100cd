"""One HTTP connection, with a bound on what uvicorn leaves unbounded: how long the head of a request may take.

h11, because of uvicorn's two parsers it is the one that bounds the size of headers.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 20.0


class HttpConnection(H11Protocol):
    """Closes itself when the head of a request is not complete in time, however slowly its bytes keep coming.

    The clock starts with the connection, later with the first byte after an answer; between the two uvicorn's own
    keep-alive applies.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def data_received(self, data: bytes) -> None:
        """Starts the clock with the first byte of a head, and stops it with the last."""
        super().data_received(data)
        if not self._awaits_head:
            self._stop_clock()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP; a request whose body they belong to then has no client any more."""
        if not self._awaits_head:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # its answer has begun
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _give_up(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _stop_clock(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
