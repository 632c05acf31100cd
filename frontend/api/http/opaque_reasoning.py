"""Reasoning as a text that clients only carry back. It is not encrypted: nothing here is hidden from them."""

import base64
import binascii

_PREFIX = "reasoning:"


def encoded(reasoning: str) -> str:
    """The reasoning as an opaque text."""
    return _PREFIX + base64.b64encode(reasoning.encode()).decode()


def decoded(opaque: str) -> str:
    """The reasoning that `encoded` was given; empty for any other text."""
    if not opaque.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(opaque.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
