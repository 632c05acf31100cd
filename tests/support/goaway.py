"""An HTTP/2 client that leaves at once and says why, in words that a server may log."""


def goaway(text: bytes) -> bytes:
    """Returns the bytes of an HTTP/2 client that closes at once with a reason: preface, SETTINGS, GOAWAY."""

    def frame(kind: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload

    settings, gone = frame(4, b""), frame(7, bytes(4) + (2).to_bytes(4, "big") + text)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + gone
