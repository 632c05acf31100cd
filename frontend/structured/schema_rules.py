"""What is refused in a JSON Schema beyond what the library refuses by itself. Pure.

The library takes two members of the same name for two, a validator for one: with `minProperties` an answer could have
too few. It reads its own options from the schema; those are ours to set.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("additionalProperties", "items", "additionalItems", "not")


def check_schema(schema: dict[str, Any]) -> str:
    """What cannot be held to; empty: nothing that is known here.

    Args:
        schema: as parsed from JSON.
    """
    if "x-guidance" in schema:
        return "a schema cannot be held to with x-guidance: not supported"
    for part in _subschemas(schema):
        least, required = part.get("minProperties"), part.get("required")
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        if isinstance(least, int) and least > max(1, num_required):
            return (
                f"a schema cannot be held to with minProperties {least}, more than 1 and more than the {num_required} "
                "members it requires: not supported"
            )
    return ""


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all within it, whatever their depth, and whatever else of it is referred to as one."""
    waiting: list[Any] = [schema]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part.get("$ref"), str):
            waiting.append(_referred(schema, part["$ref"]))
        for keyword in _SCHEMAS_BY_NAME:
            by_name = part.get(keyword)
            waiting.extend(by_name.values() if isinstance(by_name, dict) else ())
        for keyword in _LISTS_OF_SCHEMAS:
            entries = part.get(keyword)
            waiting.extend(entries if isinstance(entries, list) else ())
        waiting.extend(part.get(keyword) for keyword in _SCHEMAS)


def _referred(schema: dict[str, Any], reference: str) -> Any:
    """What a JSON pointer behind # leads to; None: nothing."""
    part: Any = schema
    for step in unquote(reference.partition("#")[2]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            part = part.get(name) if isinstance(part, dict) else None
    return part
