"""Converts values to plain JSON: without NaN, infinity and numpy types."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def plain(value: object) -> Any:
    """Dataclasses and named tuples become objects, arrays and tuples lists, NaN null, infinities "inf" and "-inf"."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    return str(value)


def to_json(value: object, *, indent: int | None = None) -> str:
    """The text of it, which UTF-8 can hold: half a surrogate pair, as in a text that a server cut, is escaped."""
    separators = (",", ":") if indent is None else None
    text = json.dumps(plain(value), indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace").decode()
