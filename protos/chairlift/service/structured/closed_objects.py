"""Closes the objects of a schema: undeclared members are disallowed unless the schema allows them. Pure.

OpenAI interprets tool parameters and strict schemas this way, unlike JSON Schema.
"""

from collections.abc import Iterable, Iterator, Mapping
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
    sources = {id(schema): list(_sources(root, schema)) for schema in objects}
    parts_of = {of: [id(part) for source in all_of for part in source] for of, all_of in sources.items()}
    wholes_of: dict[int, list[int]] = {}
    for whole, parts in parts_of.items():
        for part in parts:
            wholes_of.setdefault(part, []).append(whole)
    declaring = _reached((id(schema) for schema in objects if _declares_properties(schema)), wholes_of)

    def num_declaring(schema: Schema) -> int:
        declares = (any(id(part) in declaring for part in source) for source in sources[id(schema)])
        return _declares_properties(schema) + sum(declares)

    combined = _reached((id(schema) for schema in objects if num_declaring(schema) > 1), parts_of)
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


def _reached(starts: Iterable[int], following: Mapping[int, Iterable[int]]) -> set[int]:
    """Returns the schemas that are reached from some of them, by their ids."""
    waiting = list(starts)
    reached = set(waiting)
    while waiting:
        new = set(following.get(waiting.pop(), ())) - reached
        reached |= new
        waiting += new
    return reached
