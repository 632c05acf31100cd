"""Walks a JSON value level by level, at any depth. Pure."""

from collections.abc import Iterator
from typing import Any


def json_levels(value: Any) -> Iterator[list[Any]]:
    """Yields the values of each level: the value itself, its members or entries, theirs, and so on."""
    level = [value]
    while level:
        yield level
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
