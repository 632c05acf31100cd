"""The JSON types that a tool's schema allows for each argument."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from frontend.text.chat.call_family import JsonSchema

TEXT = frozenset({"string"})
"""The types of an argument that is always a string."""

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def kinds_of_argument(parameters: JsonSchema | None, key: str) -> frozenset[str] | None:
    """Returns the types that an argument may have; None: any, or unknown."""
    if not parameters:
        return None
    return kinds_of(parameters, properties_of(parameters).get(key))


def properties_of(parameters: JsonSchema) -> dict[str, Any]:
    """Returns the schemas of a tool's arguments by name, including required arguments without a description."""
    schema = resolved(parameters, parameters)
    properties, required = schema.get("properties"), schema.get("required")
    found = dict(properties) if isinstance(properties, dict) else {}
    return found | {name: {} for name in names_in(required) if name not in found}


def names_in(required: Any) -> list[str]:
    """Returns the strings in a list of names, which may be malformed."""
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def resolved(root: JsonSchema, schema: Any) -> JsonSchema:
    """Returns a schema after following its reference, or its only part in `allOf`."""
    for _ in range(16):  # bounded, because references may be circular
        if not isinstance(schema, Mapping):
            return {}
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            _, _, path = reference.partition("#/")
            keyword, _, name = path.partition("/")
            definitions = root.get(keyword)
            schema = definitions.get(name) if isinstance(definitions, Mapping) else None
        elif isinstance(parts, list) and len(parts) == 1 and "properties" not in schema:
            schema = parts[0]
        else:
            return schema
    return {}


def alternatives_of(root: JsonSchema, schema: Any) -> Iterator[JsonSchema]:
    """Yields the schemas of which a value must match one, resolved: those of unions, in order, or the schema itself."""
    waiting, seen = [schema], set[int]()
    while waiting:
        part = resolved(root, waiting.pop())
        if id(part) in seen:  # references may be circular
            continue
        seen.add(id(part))
        alternatives = part.get("anyOf", part.get("oneOf"))
        if isinstance(alternatives, list) and alternatives:
            waiting.extend(reversed(alternatives))
        else:
            yield part


def kinds_of(root: JsonSchema, schema: Any) -> frozenset[str] | None:
    """Returns the types that a schema allows; None: any, or unknown."""
    kinds: set[str] = set()
    for part in alternatives_of(root, schema):
        if not (own := _own_kinds(part)):
            return None
        kinds |= own
    return frozenset(kinds)


def _own_kinds(schema: JsonSchema) -> set[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return {"null" if value is None else _KINDS[type(value)] for value in values}


_PYTHON = {"True": ("true", "boolean"), "False": ("false", "boolean"), "None": ("null", "null")}


def as_json(written: str, kinds: frozenset[str] | None) -> str:
    """Returns a value as JSON: unchanged if it is JSON of an allowed type, otherwise as a string.

    Python's constants count as JSON where no string is allowed: Qwen's templates show them to the model.
    """
    constant, kind = _PYTHON.get(written.strip(), ("", ""))
    if kinds is not None and kind in kinds and "string" not in kinds:
        return constant
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(written, ensure_ascii=False)
    kind = "null" if value is None else _KINDS[type(value)]
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    if fits or "string" not in (kinds or ()):
        return written.strip()
    return json.dumps(written, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON
