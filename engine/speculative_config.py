"""Reads --speculative-config, which has vLLM's form."""

import json
from typing import Any

from engine.core.drafts import DraftLimits
from engine.errors import ConfigError

_FLAG = "--speculative-config"
_METHOD = "ngram"
_MAX_TOKENS = 64
_LONGEST = 32
_DEFAULT_MAX, _DEFAULT_MIN = 4, 2


def parse_speculative_config(text: str) -> DraftLimits:
    """Returns the limits of drafts.

    Args:
        text: a JSON object with "method", "num_speculative_tokens", and as vLLM allows "prompt_lookup_max" and
            "prompt_lookup_min"; one of the two alone stands for both, without either they are 4 and 2.
    Raises: ConfigError: names the flag, the field, its value and what is allowed.
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{_FLAG} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{_FLAG} must be a JSON object with the field method, it is {json.dumps(fields)[:80]}")
    known = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
    if unknown := sorted(fields.keys() - known):
        raise ConfigError(f"{_FLAG} has the unknown field {unknown[0]}; known are {', '.join(sorted(known))}")
    if (method := fields.get("method")) != _METHOD:
        raise ConfigError(f'{_FLAG}: method is {json.dumps(method)[:80]}, only "{_METHOD}" is supported')
    if "num_speculative_tokens" not in fields:
        raise ConfigError(f"{_FLAG} lacks num_speculative_tokens: how many tokens a draft has at most, such as 8")
    num_tokens = _integer(fields, "num_speculative_tokens", _MAX_TOKENS)
    longest = _integer(fields, "prompt_lookup_max", _LONGEST) if "prompt_lookup_max" in fields else None
    shortest = _integer(fields, "prompt_lookup_min", _LONGEST) if "prompt_lookup_min" in fields else None
    if longest is None and shortest is None:
        longest, shortest = _DEFAULT_MAX, _DEFAULT_MIN
    longest = shortest if longest is None else longest
    shortest = longest if shortest is None else shortest
    assert longest is not None
    assert shortest is not None
    if shortest > longest:
        raise ConfigError(f"{_FLAG}: prompt_lookup_min is {shortest}, must be at most prompt_lookup_max, {longest}")
    return DraftLimits(num_tokens, longest, shortest)


def _integer(fields: dict[str, Any], name: str, maximum: int) -> int:
    value = fields[name]
    if type(value) is not int or not 1 <= value <= maximum:
        shown = json.dumps(value)[:80]
        raise ConfigError(f"{_FLAG}: {name} is {shown}, must be a whole number between 1 and {maximum}")
    return value
