"""Closes the objects of a schema: members that it does not name are disallowed unless it says otherwise. Pure.

OpenAI reads the parameters of tools and strict schemas this way; JSON Schema itself does not.
"""

from collections.abc import Iterator
from typing import Any

from frontend.text.structured.schema_walk import Schema, referred, subschemas

_DESCRIBES_MEMBERS = ("properties", "patternProperties")
_SAYS_WHAT_ELSE = ("additionalProperties", "unevaluatedProperties")


def close_objects(root: Schema) -> None:
    """Adds `additionalProperties: false` to every object that lists its properties and does not say what else it has.

    An object that lists none stays open: only {} would be left of it. So does one that is described by several schemas
    at once (`allOf`, or a `$ref` beside `properties`): each of them would forbid what the others describe. A member
    that is required but not listed is listed first.
    """
    objects = [subschema.schema for subschema in subschemas(root)]
    combined: set[int] = set()
    for schema in objects:
        sources = [source for source in _sources(root, schema) if any(_describes(root, part) for part in source)]
        if len(sources) + _describes_itself(schema) > 1:
            combined.update(_in_place(root, schema))
    for schema in objects:
        properties = schema.get("properties")
        if isinstance(properties, dict) and id(schema) not in combined and not _says_what_else(schema):
            required = schema.get("required")
            for name in required if isinstance(required, list) and "patternProperties" not in schema else ():
                properties.setdefault(str(name), {})
            schema["additionalProperties"] = False


def _says_what_else(schema: Schema) -> bool:
    return any(keyword in schema for keyword in _SAYS_WHAT_ELSE)


def _describes_itself(schema: Schema) -> bool:
    return any(schema.get(keyword) for keyword in _DESCRIBES_MEMBERS)


def _sources(root: Schema, schema: Schema) -> Iterator[list[Any]]:
    """The schemas that hold for the same value at once; of those in a list any one does."""
    yield [referred(root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
    parts = schema.get("allOf")
    yield from ([part] for part in (parts if isinstance(parts, list) else ()))
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        yield alternatives if isinstance(alternatives, list) else []


def _in_place(root: Schema, schema: Any) -> set[int]:
    """The ids of a schema and of all that hold for the same value."""
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            waiting.extend(other for source in _sources(root, part) for other in source)
    return seen


def _describes(root: Schema, schema: Any) -> bool:
    """Whether a schema, or one that holds for the same value, describes members."""
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        if _describes_itself(part):
            return True
        seen.add(id(part))
        waiting.extend(other for source in _sources(root, part) for other in source)
    return False
