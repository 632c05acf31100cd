"""Finds all subschemas of a JSON Schema with their paths, at any depth. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from chairlift.service.structured.output_constraint import ConstraintError

Schema = dict[str, Any]

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("additionalProperties", "propertyNames", "items", "additionalItems", "not")


class Subschema(NamedTuple):
    """A schema within a schema.

    Attributes:
        path: its path, such as "properties.seats.items"; empty for the whole schema.
    """

    path: str
    schema: Schema

    def at(self, keyword: str) -> str:
        """Returns the path of one of its keywords."""
        return f"{self.path}.{keyword}" if self.path else keyword

    def refusal(self, keywords: Sequence[str], why: str = "") -> ConstraintError:
        """Returns the error that names the place of keywords that cannot be enforced."""
        place = f"{self.at(keywords[0])}: " if self.path else ""
        return ConstraintError(f"{place}cannot enforce a schema with {', '.join(keywords)}{why and ' ' + why}")


def subschemas(root: Schema) -> Iterator[Subschema]:
    """Yields a schema and all its subschemas and references, each once. The caller may modify them."""
    waiting: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    definitions = _definitions(root)  # consumed by the first reference that needs them
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        here = Subschema(path, schema)
        yield here
        waiting.extend(reversed([*_parts(here), *_referred_by(root, schema, definitions)]))


def referred(root: Schema, reference: str) -> Any:
    """Resolves a JSON pointer after #; returns None if it cannot be resolved."""
    pointer = unquote(reference.partition("#")[2])
    if pointer and not pointer.startswith("/"):
        return None
    schema: Any = root
    for name in _steps(pointer):
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _parts(here: Subschema) -> Iterator[tuple[str, Any]]:
    for keyword in _SCHEMAS_BY_NAME:
        by_name = here.schema.get(keyword)
        if isinstance(by_name, dict):
            yield from ((f"{here.at(keyword)}.{name}", part) for name, part in by_name.items())
    for keyword in _LISTS_OF_SCHEMAS:
        entries = here.schema.get(keyword)
        if isinstance(entries, list):
            yield from ((f"{here.at(keyword)}[{index}]", part) for index, part in enumerate(entries))
    for keyword in _SCHEMAS:
        yield here.at(keyword), here.schema.get(keyword)


def _referred_by(root: Schema, schema: Schema, definitions: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the definition that a schema refers to, or what is left of `definitions` if the reference is not a JSON
    pointer.
    """
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return
    found = referred(root, reference)
    if found is not None:
        yield ".".join(_steps(unquote(reference.partition("#")[2]))), found
    else:
        yield from definitions


def _definitions(root: Schema) -> Iterator[tuple[str, Any]]:
    for keyword in _DEFINITIONS:
        by_name = root.get(keyword)
        if isinstance(by_name, dict):
            yield from ((f"{keyword}.{name}", part) for name, part in by_name.items())


def _steps(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
