"""Ids of tool calls, in the formats that templates accept."""

import secrets
import string

_ALPHANUMERIC = string.ascii_letters + string.digits


def long_call_id() -> str:
    """Returns an id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Returns nine letters and digits, the only format that Mistral's templates accept."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
