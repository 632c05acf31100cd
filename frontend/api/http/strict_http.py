"""Strict HTTP/1.1 parsing (RFC 9112): refuses ambiguous requests, against request smuggling.

h11 accepts some obsolete syntax: lines that end in a bare LF, folded header lines, two framings of one body. A proxy
that parses such a request differently would turn one client's bytes into another client's request.
"""

from __future__ import annotations

import re

import h11
from h11._receivebuffer import ReceiveBuffer

_VERSIONS = (b"1.0", b"1.1")
_ABSOLUTE_FORM = re.compile(rb"https?://([^/?]+)(.*)", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """Server side of a connection. Refuses ambiguous requests, and sends a response's head with the start of its body.

    Attributes:
        refusal: why the last request was refused, with a status in `error_status_hint`; None: it was not.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._receive_buffer: ReceiveBuffer = _CrlfLines(max_head_bytes)
        self._held_head = b""
        self.refusal: h11.RemoteProtocolError | None = None

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event.

        Raises:
            h11.RemoteProtocolError: the bytes are not HTTP, or are ambiguous.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                _check_request(event)
                event = _in_origin_form(event)
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """Returns the bytes to write for an event. A response's head is held back until the next event: two small
        writes would cost two packets, two system calls and two wake-ups of the client.
        """
        data = super().send(event)
        if data is None:  # the connection is closed
            return None
        if isinstance(event, h11.Response):
            self._held_head = data
            return b""
        head, self._held_head = self._held_head, b""
        return head + data if head else data


class _CrlfLines(ReceiveBuffer):
    """Receive buffer that requires lines of heads and trailers to end in CRLF and not to be folded.

    Args:
        max_bytes: most bytes of a head or trailer. h11 limits only those that are incomplete.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def maybe_extract_lines(self) -> list[bytearray] | None:
        num_bytes = len(self)
        lines = super().maybe_extract_lines()
        if lines is None:
            return None
        num_bytes -= len(self)
        if num_bytes > self._max_bytes:
            raise h11.LocalProtocolError(f"the head has {num_bytes} bytes, at most {self._max_bytes} are allowed", 431)
        if num_bytes != sum(len(line) + 2 for line in lines) + 2:
            raise h11.LocalProtocolError("a line ends in LF alone, it must end in CRLF")
        if any(line.startswith((b" ", b"\t")) for line in lines):
            raise h11.LocalProtocolError("a header line begins with white space: folded lines are not accepted")
        return lines


def _check_request(request: h11.Request) -> None:
    version = request.http_version
    if version not in _VERSIONS:
        raise h11.RemoteProtocolError(f"HTTP/{version.decode()} is not supported, only 1.0 and 1.1 are", 505)
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both")
        if version == b"1.0":
            raise h11.RemoteProtocolError("Transfer-Encoding needs HTTP/1.1")


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Returns the request with the path alone as its target. Clients of a forward proxy send a whole URL, which every
    server must accept; its host then counts instead of the header's (RFC 9112, section 3.2.2).
    """
    absolute = _ABSOLUTE_FORM.fullmatch(request.target)
    if absolute is None:
        return request
    host, target = absolute.groups()
    return h11.Request(
        method=request.method,
        headers=[(name, host if name == b"host" else value) for name, value in request.headers],
        target=target if target.startswith(b"/") else b"/" + target,
        http_version=request.http_version,
    )
