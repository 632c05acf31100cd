"""The operator's defaults for the variables of chat templates: `--default-chat-template-kwargs`."""

import json
from typing import Any

from frontend.json_levels import json_levels
from frontend.limits import MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_NUMBER_CHARS, MAX_TOOLS_BYTES

OWN_NAMES = ("messages", "tools", "add_generation_prompt")
"""Variables that a template gets from the request's other fields."""

ALLOWED = (
    f"a JSON object of at most {MAX_TOOLS_BYTES} bytes, {MAX_JSON_VALUES} values and {MAX_JSON_DEPTH - 1} levels, "
    f"with finite numbers only and without {', '.join(OWN_NAMES)}"
)
"""What `are_template_kwargs` accepts, in words that follow "it must be"."""


def parse_json(text: str) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: it is not JSON, or has a number that a request may not have.
    """
    try:
        return json.loads(text, parse_int=_integer, parse_float=_float)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def are_template_kwargs(value: object) -> bool:
    """Returns whether a value is a JSON object that a request could have as its `chat_template_kwargs`."""
    if not isinstance(value, dict) or any(name in OWN_NAMES for name in value):
        return False
    num_values = 0
    for depth, level in enumerate(json_levels(value), 1):
        num_values += len(level)
        has_containers = any(isinstance(one, dict | list) for one in level)
        if num_values > MAX_JSON_VALUES or (has_containers and depth >= MAX_JSON_DEPTH):
            return False
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode()) <= MAX_TOOLS_BYTES
    except ValueError:  # half a character, or a number that is not finite
        return False


def _integer(digits: str) -> int:
    return int(_checked(digits))


def _float(digits: str) -> float:
    return float(_checked(digits))


def _checked(digits: str) -> str:
    if len(digits) > MAX_NUMBER_CHARS:
        raise ValueError(f"a number has more than {MAX_NUMBER_CHARS} digits")
    return digits
