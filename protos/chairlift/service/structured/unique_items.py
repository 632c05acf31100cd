"""Enumerates the arrays of distinct items that a schema allows: llguidance has no `uniqueItems`. Pure."""

import itertools
import json
import math
from typing import Any

from chairlift.service.structured.schema_walk import Schema, referred

MAX_ARRAYS = 1_024
"""Allows all orders of 5 values, and all subsets of 10. The library compiles this many arrays in 0.1 s."""

_COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf")
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_CONSTRAINTS = _BOUNDS.union(
    _COMBINATIONS,
    ("const", "enum", "type", "not", "multipleOf", "format", "pattern", "minLength", "maxLength", "items"),
    (
        "prefixItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
    ),
    ("minProperties", "maxProperties", "propertyNames"),
)
"""Keywords that restrict values; all others are annotations."""


class NotEnumerable(Exception):  # noqa: N818
    """The arrays cannot be enumerated; the message says why."""


def distinct_arrays(root: Schema, schema: Schema) -> list[list[Any]] | None:
    """Returns the arrays of distinct items that a schema with `uniqueItems` allows.

    They contain all orders of the values if these are few enough, otherwise only the schema's order.

    Args:
        root: the whole schema, for references.
        schema: the array's schema.
    Returns: None if nothing is needed, because the array has at most one item.
    Raises: NotEnumerable: the items may have too many values.
    """
    least, most = _count(schema.get("minItems"), 0), _count(schema.get("maxItems"), None)
    if most is not None and most <= 1:
        return None
    if schema.get("prefixItems") or isinstance(schema.get("items"), list):
        raise NotEnumerable("of items that have schemas of their own")
    try:
        values = _values(root, schema.get("items"), {})
    except RecursionError:
        raise NotEnumerable("of items whose references are nested too deeply") from None
    if values is None:
        raise NotEnumerable("unless maxItems is at most 1 or the items have an enum or a small range")
    most = len(values) if most is None else min(most, len(values))
    sizes = range(least, most + 1)
    for number_of, arrays_of in ((math.perm, itertools.permutations), (math.comb, itertools.combinations)):
        # The running sum, because that of all sizes may have a number of digits that takes minutes.
        if all(total <= MAX_ARRAYS for total in itertools.accumulate(number_of(len(values), size) for size in sizes)):
            return [list(array) for size in sizes for array in arrays_of(values, size)]
    raise _too_many(len(values))


def _too_many(num_values: int) -> NotEnumerable:
    return NotEnumerable(f"of {num_values} values: more than {MAX_ARRAYS:,} arrays")


def _count(value: Any, default: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _values(root: Schema, schema: Any, known: dict[int, list[Any] | None]) -> list[Any] | None:
    """Returns the distinct values that a schema of items allows; None if they are too many or unknown.

    Args:
        root: the whole schema.
        schema: of the items.
        known: what was found for other schemas, by their ids. References may lead to one schema on more paths than can
            be followed.
    """
    if not isinstance(schema, dict):
        return None
    if id(schema) not in known:
        known[id(schema)] = None  # of a schema within itself
        known[id(schema)] = _found_values(root, schema, known)
    return known[id(schema)]


def _found_values(root: Schema, schema: Schema, known: dict[int, list[Any] | None]) -> list[Any] | None:
    found, said = _own_values(schema), {keyword for keyword in schema if keyword in _CONSTRAINTS}
    if found is None and len(said - {"type"}) == 1:
        (keyword,) = said - {"type"}
        parts = schema[keyword]
        if keyword == "$ref":
            parts = [referred(root, parts)] if isinstance(parts, str) else None
        if keyword in _COMBINATIONS and isinstance(parts, list) and (keyword != "allOf" or len(parts) == 1):
            values = [_values(root, part, known) for part in parts]
            if (num_found := sum(len(part) for part in values if part)) > MAX_ARRAYS:
                raise _too_many(num_found)  # before they are copied: definitions may multiply them without end
            found = None if None in values else [value for part in values if part for value in part]
    if found is None:
        return None
    allowed = [value for value in found if _is_of_type(value, schema.get("type"))]
    return list({json.dumps(_as_integer(value), sort_keys=True): value for value in reversed(allowed)}.values())[::-1]


def _own_values(schema: Schema) -> list[Any] | None:
    match {keyword: value for keyword, value in schema.items() if keyword in _CONSTRAINTS}:
        case {"const": value, **rest} if not rest.keys() - {"type"}:
            return [value]
        case {"enum": list(values), **rest} if not rest.keys() - {"type"}:
            return values
        case {"type": "boolean", **rest} if not rest:
            return [False, True]
        case {"type": "null", **rest} if not rest:
            return [None]
        case {"type": "integer", **rest} if not rest.keys() - _BOUNDS:
            low, high = _bound(schema, "inimum", 1), _bound(schema, "aximum", -1)
            if low is not None and high is not None and high - low < MAX_ARRAYS:
                return list(range(low, high + 1))
    return None


def _is_of_type(value: Any, kinds: Any) -> bool:
    match value:
        case None:
            kind = "null"
        case bool():
            kind = "boolean"
        case int() | float():
            kind = "integer" if isinstance(_as_integer(value), int) else "number"
        case _:
            kind = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list):
        return kinds is None
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _bound(schema: Schema, name: str, inwards: int) -> int | None:
    """Returns the tightest integer bound of (exclusive) `m{name}`; None without one, or if it is not an integer."""
    bounds = []
    for keyword, offset in ((f"m{name}", 0), (f"exclusiveM{name}", inwards)):
        if keyword in schema:
            value = _count(schema[keyword], None)
            if value is None:
                return None
            bounds.append(value + offset)
    return (max(bounds) if inwards > 0 else min(bounds)) if bounds else None


def _as_integer(value: Any) -> Any:
    """Converts whole numbers to integers, because 1 and 1.0 are equal in JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
