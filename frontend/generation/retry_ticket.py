"""Tickets of refused requests: a signed text that presents a booking at the retry. Pure: time is passed in.

A ticket is valid once, from its slot on, for the tenant and the service class that it was made for and for a prompt
that is not longer. Processes that share the key accept each other's tickets, but each of them counts uses by itself.
"""

import base64
import binascii
import hmac
import struct
from hashlib import sha256
from typing import NamedTuple

EARLY_S = 0.25
"""Tolerance for clients whose timers are early, and for clocks of several frontends."""

LATE_S = 5.0
"""How long after its slot a ticket is valid."""

MIN_KEY_BYTES = 16

_CONTENT = struct.Struct(">QQI")  # booking, slot in Unix ms, tokens
_MAC_BYTES = 16
_MAX_TOKENS = 2**32 - 1


class TicketError(ValueError):
    """A ticket that is not accepted; the message reads on from "retry_ticket "."""


class Promise(NamedTuple):
    """What a ticket stands for.

    Attributes:
        tenant, service_class: of the request.
        slot_s: Unix seconds when the client may come back.
        num_tokens: estimated tokens of the prompt.
    """

    tenant: str
    service_class: str
    slot_s: float
    num_tokens: int


class RetryTickets:
    """Issues and redeems tickets.

    Args:
        key: secret of at least MIN_KEY_BYTES, shared by all frontends that accept the tickets.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._used: dict[int, float] = {}  # Unix seconds when the ticket expires, by booking; in order of use

    def issue(self, booking: int, promise: Promise) -> str:
        """Returns the ticket of a booking: URL-safe ASCII."""
        content = _CONTENT.pack(booking, round(promise.slot_s * 1000), min(promise.num_tokens, _MAX_TOKENS))
        return base64.urlsafe_b64encode(content + self._mac(content, promise.tenant, promise.service_class)).decode()

    def redeem(self, ticket: str, asked: Promise) -> int:
        """Returns the booking of a ticket and uses it up.

        Args:
            ticket: as the client sent it.
            asked: the request that presents it, with the time now as its slot.

        Raises:
            TicketError: it is forged, was made for another request, is used, comes too early, or has expired.
        """
        try:
            data = base64.b64decode(ticket.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            data = b""
        content, mac = data[: _CONTENT.size], data[_CONTENT.size :]
        if len(data) != _CONTENT.size + _MAC_BYTES or not hmac.compare_digest(
            mac, self._mac(content, asked.tenant, asked.service_class)
        ):
            raise TicketError("is no ticket of this server for this tenant and service class")
        booking, slot_ms, num_tokens = _CONTENT.unpack(content)
        now_s, slot_s = asked.slot_s, slot_ms / 1000
        if asked.num_tokens > num_tokens:
            raise TicketError(f"is for about {num_tokens} prompt tokens, the prompt has about {asked.num_tokens}")
        if now_s < slot_s - EARLY_S:
            raise TicketError(f"is valid in {slot_s - now_s:.2f} s, not yet")
        if now_s > slot_s + LATE_S:
            raise TicketError(f"expired {now_s - slot_s - LATE_S:.2f} s ago: send the request without it")
        self._forget_expired(now_s)
        if booking in self._used:
            raise TicketError("has been used: send the request without it")
        self._used[booking] = slot_s + LATE_S
        return int(booking)

    @property
    def num_used(self) -> int:
        """Used tickets that are remembered because they have not expired."""
        return len(self._used)

    def _mac(self, content: bytes, tenant: str, service_class: str) -> bytes:
        fields = (content, tenant.encode(), service_class.encode())
        message = b"".join(struct.pack(">I", len(field)) + field for field in fields)
        return hmac.digest(self._key, b"chairlift retry ticket 1" + message, sha256)[:_MAC_BYTES]

    def _forget_expired(self, now_s: float) -> None:
        """Tickets are used in about the order in which they expire, within LATE_S + EARLY_S."""
        while self._used and next(iter(self._used.values())) < now_s:
            del self._used[next(iter(self._used))]
