"""Parser of server-sent events as servers really send them.

Pure: bytes in, the data of whole events out. Follows the parsing rules of the HTML standard (9.2.6) as far as data
goes; it works on bytes, so that a character may be split between two reads.
"""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventReader:
    """Parses one stream. Lines may end in LF, CRLF or CR; skips comments, other fields and empty events."""

    def __init__(self) -> None:
        self._rest = b""  # a line whose end has not come
        self._data: list[bytes] = []  # of the event whose end has not come
        self._after_cr = False  # a CR ended the last read: an LF now belongs to it
        self._is_first_line = True

    def feed(self, received: bytes) -> list[bytes]:
        """Takes the bytes of one read.

        Returns: the data of each event that is complete now, its lines joined by LF.
        """
        if not received:
            return []
        if self._after_cr and received.startswith(b"\n"):
            received = received[1:]
        self._after_cr = received.endswith(b"\r")
        buffer = self._rest + received
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = buffer.split(b"\n")
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append(self._event())
            self._is_first_line = False
        return events

    def close(self) -> list[bytes]:
        """Ends the stream.

        Returns: the data of an event that lacks its empty line, for servers that forget the last one.
        """
        if self._rest:
            self._take(self._rest)
            self._rest = b""
        return [self._event()] if self._data else []

    def _take(self, line: bytes) -> None:
        if self._is_first_line:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b" ", 5) else line[5:])
        elif line == b"data":
            self._data.append(b"")

    def _event(self) -> bytes:
        data = b"\n".join(self._data)
        self._data.clear()
        return data
