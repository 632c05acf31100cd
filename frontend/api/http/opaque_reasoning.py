"""Encodes reasoning as an opaque string that clients send back unread. It is not encrypted."""

import base64
import binascii

_PREFIX = "reasoning:"


def encoded(reasoning: str) -> str:
    """Encodes reasoning."""
    return _PREFIX + base64.b64encode(reasoning.encode()).decode()


def decoded(opaque: str) -> str:
    """Decodes a string of `encoded`; any other string gives an empty text."""
    if not opaque.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(opaque.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
