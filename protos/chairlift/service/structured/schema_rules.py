"""Rewrites a JSON Schema with keywords that llguidance supports, or reports what cannot be enforced. Pure.

The library refuses unknown keywords without naming their place. It also refuses some that have no effect or can be
expressed differently: an unknown `format`, `uniqueItems` of few values, `propertyNames` of records, and `oneOf` with a
discriminator. It counts two members with the same name as two, unlike validators, so that `minProperties` could be
violated. It reads options from the schema, which only Chairlift may set. `number_rules` has what concerns numbers.
"""

import math
from collections.abc import Callable
from typing import Any

from chairlift.service.structured.number_rules import (
    MAX_REMAINDERS,
    exclude_bounds,
    narrow_bounds,
    num_remainders,
    refuse_inexact_values,
)
from chairlift.service.structured.output_constraint import ConstraintError
from chairlift.service.structured.schema_walk import Schema, Subschema, referred, subschemas
from chairlift.service.structured.unique_items import NotEnumerable, distinct_arrays

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Values of `format` that the library enforces; others are annotations."""

JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    # A space, or a line break with indentation: enough for what models generate, without room for endless whitespace.
    "whitespace_pattern": r" ?|\n[ ]{0,32}",
    "coerce_one_of": False,
    "lenient": False,
}
"""The library's options, under `x-guidance`. A frontend sends them to an engine with `--api vllm` too."""

_REFUSED = (
    *("contains", "dependencies", "dependentRequired", "dependentSchemas", "$dynamicRef", "else", "if", "maxContains"),
    *("minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    "x-guidance",
)
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "x-guidance": (JSON_OPTIONS,),
}
_TYPES = ("array", "boolean", "null", "number", "object", "string")

# RFC 3339 allows a second 60 and the year 0, which date libraries and validators refuse; the library, February 29 in
# every year.
_BY_FOUR = "(0[48]|[2468][048]|[13579][26])"
_DATE = (
    rf"(([0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29"
    r"|([1-9].{3}|0[1-9].{2}|00[1-9].|000[1-9])-(0[13-9].{3}|1.{4}|02-[01].|02-2[0-8]))"
)
_TIMES = {"date": f"^{_DATE}", "date-time": f"^{_DATE}.{{7}}[0-5]", "time": "^.{6}[0-5]"}

# The library's regular expressions have no look-around; these are equivalent without it.
_SAME_PATTERNS = {
    # pydantic's Decimal as a string
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    # zod's email
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
}


def servable(root: Schema) -> Schema:
    """Rewrites a schema with keywords that the library supports.

    Args:
        root: the parsed schema, which is modified.
    Raises: ConstraintError: the schema cannot be enforced; the message names the place.
    """
    remainders = 1  # `allOf` and `$ref` may combine several
    for subschema in subschemas(root):
        for rule in _RULES:
            rule(root, subschema)
        remainders = math.lcm(remainders, num_remainders(subschema.schema))
        if remainders > MAX_REMAINDERS:
            why = f"the values of multipleOf together have more than {MAX_REMAINDERS:,} remainders"
            raise subschema.refusal(["multipleOf"], f"{subschema.schema['multipleOf']}: {why}")
        if refused := [keyword for keyword in _REFUSED if keyword in subschema.schema]:
            raise subschema.refusal(refused)
    return root


def _add_to_all(schema: Schema, part: Schema) -> None:
    parts = schema.setdefault("allOf", [])
    if not isinstance(parts, list):
        raise ConstraintError("allOf must be a list of schemas")
    parts.append(part)


def _drop_keywords_without_effect(_root: Schema, subschema: Subschema) -> None:
    schema = subschema.schema
    for keyword, values in _NO_EFFECT.items():
        if keyword in schema and schema[keyword] in values:
            del schema[keyword]


def _drop_unknown_format(_root: Schema, subschema: Subschema) -> None:
    schema = subschema.schema
    if not (isinstance(schema.get("format"), str) and schema["format"] in FORMATS):
        schema.pop("format", None)


def _exclude_impossible_times(_root: Schema, subschema: Subschema) -> None:
    schema = subschema.schema
    if (pattern := _TIMES.get(schema.get("format", ""))) is not None:
        _add_to_all(schema, {"pattern": pattern})


def _replace_pattern(_root: Schema, subschema: Subschema) -> None:
    schema = subschema.schema
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _SAME_PATTERNS.get(pattern, pattern)


def _rewrite_not_anything(_root: Schema, subschema: Subschema) -> None:
    """Rewrites `not: {}`, with which zod describes absent members."""
    schema = subschema.schema
    if schema.get("not", False) in (True, {}):
        del schema["not"]
        _add_to_all(schema, {"anyOf": [False]})


def _rewrite_property_names(root: Schema, subschema: Subschema) -> None:
    """Rewrites `propertyNames`: an enum becomes optional properties, a pattern becomes `patternProperties`."""
    schema = subschema.schema
    names = schema.get("propertyNames")
    if isinstance(names, dict) and isinstance(names.get("$ref"), str):
        names = referred(root, names["$ref"])
    if not isinstance(names, dict):
        return
    said = {key: value for key, value in names.items() if key not in ("title", "description", "type", "$schema")}
    if names.get("type", "string") != "string":
        return
    others = schema.get("additionalProperties", True)
    match said:
        case {"enum": list(allowed), **rest} if not rest and not schema.get("patternProperties"):
            listed = schema.setdefault("properties", {})
            if isinstance(listed, dict) and all(name in allowed for name in listed):
                listed.update({name: others for name in allowed if isinstance(name, str) and name not in listed})
                schema["additionalProperties"] = False
                del schema["propertyNames"]
        case {"pattern": str(pattern), **rest} if not rest and not any(
            schema.get(keyword) for keyword in ("properties", "patternProperties")
        ):
            schema["patternProperties"] = {pattern: others}
            schema["additionalProperties"] = False
            del schema["propertyNames"]
        case {**rest} if not rest:
            del schema["propertyNames"]


def _require_discriminator(_root: Schema, subschema: Subschema) -> None:
    """Requires the discriminator in each alternative, because the library cannot distinguish them without it."""
    schema = subschema.schema
    discriminator, alternatives = schema.get("discriminator"), schema.get("oneOf")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(name, str) and isinstance(alternatives, list):
        schema["oneOf"] = [{"allOf": [alternative], "required": [name]} for alternative in alternatives]


def _enumerate_distinct_items(root: Schema, subschema: Subschema) -> None:
    schema = subschema.schema
    if schema.get("uniqueItems") is not True:
        return
    kinds = schema.get("type", _TYPES)
    if not isinstance(kinds, list | tuple):
        kinds = (kinds,)
    if "array" in kinds:
        try:
            arrays = distinct_arrays(root, schema)
        except NotEnumerable as error:
            raise subschema.refusal(["uniqueItems"], str(error)) from None
        if arrays is not None:
            alternatives: list[Schema] = [{"const": array} for array in arrays]
            alternatives += [{"type": kind} for kind in kinds if kind != "array"]
            _add_to_all(schema, {"anyOf": alternatives})
            for keyword in ("items", "minItems", "maxItems"):  # the alternatives imply it
                schema.pop(keyword, None)
    del schema["uniqueItems"]


def _refuse_min_properties(_root: Schema, subschema: Subschema) -> None:
    least, required = subschema.schema.get("minProperties"), subschema.schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, num_required):
        why = f"{least}, more than 1 and more than the {num_required} members it requires"
        raise subschema.refusal(["minProperties"], why)


_RULES: tuple[Callable[[Any, Subschema], None], ...] = (
    _drop_keywords_without_effect,
    _drop_unknown_format,
    _exclude_impossible_times,
    narrow_bounds,
    exclude_bounds,
    refuse_inexact_values,
    _replace_pattern,
    _rewrite_not_anything,
    _rewrite_property_names,
    _require_discriminator,
    _enumerate_distinct_items,
    _refuse_min_properties,
)
