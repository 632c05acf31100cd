"""Closes the objects of a schema: undeclared members are disallowed unless the schema allows them. Pure.

OpenAI interprets tool parameters and strict schemas this way, unlike JSON Schema.
"""

from collections.abc import Iterator
from typing import Any

from chairlift.service.structured.schema_walk import Schema, referred, subschemas

_PROPERTIES = ("properties", "patternProperties")
_ADDITIONAL_PROPERTIES = ("additionalProperties", "unevaluatedProperties")


def close_objects(root: Schema) -> None:
    """Adds `additionalProperties: false` to every object that declares properties but nothing about additional ones.

    An object without declared properties stays open, because only {} would remain. An object described by several
    schemas at once (`allOf`, or a `$ref` beside `properties`) stays open, too, because each schema would forbid the
    properties of the others. Required properties that are not declared are declared first.
    """
    objects = [subschema.schema for subschema in subschemas(root)]
    combined: set[int] = set()
    for schema in objects:
        num_declaring = _declares_properties(schema) + sum(
            any(_declares_properties(one) for part in source for one in _same_value(root, part))
            for source in _sources(root, schema)
        )
        if num_declaring > 1:
            combined.update(map(id, _same_value(root, schema)))
    for schema in objects:
        properties = schema.get("properties")
        if isinstance(properties, dict) and id(schema) not in combined and not _limits_additional_properties(schema):
            required = schema.get("required")
            for name in required if isinstance(required, list) and "patternProperties" not in schema else ():
                properties.setdefault(str(name), {})
            schema["additionalProperties"] = False


def _limits_additional_properties(schema: Schema) -> bool:
    return any(keyword in schema for keyword in _ADDITIONAL_PROPERTIES)


def _declares_properties(schema: Schema) -> bool:
    return any(schema.get(keyword) for keyword in _PROPERTIES)


def _sources(root: Schema, schema: Schema) -> Iterator[list[Any]]:
    """Yields lists of schemas for the same value: one of each list applies."""
    yield [referred(root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
    parts = schema.get("allOf")
    yield from ([part] for part in (parts if isinstance(parts, list) else ()))
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        yield alternatives if isinstance(alternatives, list) else []


def _same_value(root: Schema, schema: Any) -> Iterator[Schema]:
    """Yields a schema and all schemas for the same value, each once."""
    waiting, seen = [schema], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting.extend(other for source in _sources(root, part) for other in source)
