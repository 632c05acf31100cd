"""Schemas in words that the library does not know: rewritten to mean the same, or refused with their place."""

import calendar
import contextlib
import copy
import json
import random

import jsonschema
import pytest

from chairlift.service.structured.grammars import grammar_of
from chairlift.service.structured.output_constraint import ConstraintError, ConstraintKind
from chairlift.service.structured.schema_rules import servable

CAT = {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat"}}, "additionalProperties": False}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "n": {"type": "null"}}, "additionalProperties": False}

REWRITTEN = {
    "format of a path": {"type": "string", "format": "path", "maxLength": 4},
    "format of an integer": {"type": "integer", "format": "int32", "maximum": 9, "minimum": 0},
    "format of nothing": {"format": "byte", "enum": ["a"]},
    "what is never there": {"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}}
    | {"additionalProperties": {"not": {}}},
    "any names": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}}
    | {"maxProperties": 2},
    "names of an enum": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}},
    "names of an enum that are required": {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}}
    | {"additionalProperties": {"const": 1}, "required": ["a", "b"]},
    "names of an enum by reference": {"$defs": {"n": {"enum": ["a", "b"], "title": "N"}}, "type": "object"}
    | {"propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": {"const": 1}},
    "names of a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[ab]$"},
        "additionalProperties": {"const": 1},
    }
    | {"maxProperties": 1},
    "models with a discriminator": {"oneOf": [CAT, DOG], "discriminator": {"propertyName": "kind"}},
    "decimal as a text": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "maxLength": 6},
    "time of the day": {"type": "string", "format": "time"},
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_drawn_texts_satisfy_the_original_schema(case, draw):
    schema = REWRITTEN[case]
    grammar, rng = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), random.Random(case)
    texts = [text for _ in range(20) if (text := draw(grammar, rng, max_tokens=300)) is not None]
    assert len(texts) >= 5
    for text in texts:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


@pytest.mark.parametrize("names", [{"enum": ["a", "b"]}, {"pattern": "^[ab]$"}])
def test_property_names_allow_their_members_with_any_value(names, keeps_to):
    grammar = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "object", "propertyNames": names}))
    assert keeps_to(grammar, '{"b":[1]}')
    assert not keeps_to(grammar, '{"c":[1]}')


@pytest.mark.parametrize("others", [{}, {"pattern": "[^a]"}])
def test_time_has_no_leap_second(others, keeps_to):
    for kind, text in (("time", "23:59:60Z"), ("date-time", "2016-12-31T23:59:60Z")):
        grammar = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "format": kind, **others}))
        assert not keeps_to(grammar, f'"{text}"')
        assert keeps_to(grammar, f'"{text.replace("60Z", "59Z")}"')


@pytest.mark.parametrize(("kind", "rest"), [("date", ""), ("date-time", "T10:20:30Z")])
def test_date_is_in_the_calendar(kind, rest, keeps_to):
    grammar = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "format": kind}))
    days = [(year, 2, 29) for year in (1600, 1700, 1900, 1996, 1999, 2000, 2004, 2010, 2012, 2018, 2023, 2024, 2100)]
    days += [(year, month, day) for year in (0, 1, 4, 10, 400) for month, day in ((1, 1), (2, 29), (12, 31))]
    days += [(2023, month, day) for month in range(1, 13) for day in (1, 9, 10, 19, 20, 28, 29, 30, 31)]
    for year, month, day in days:
        is_day = year > 0 and day <= calendar.monthrange(year, month)[1]
        assert keeps_to(grammar, f'"{year:04}-{month:02}-{day:02}{rest}"') == is_day, (year, month, day)


BOUNDS = [
    {"exclusiveMinimum": 0, "maximum": 0.5},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 0.001},
    {"exclusiveMinimum": 1, "maximum": 1.5},
    {"minimum": -0.5, "exclusiveMaximum": 0},
    {"minimum": -1.5, "exclusiveMaximum": -1},
    {"exclusiveMinimum": 0},
    {"exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.5},
    {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
    {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5},
]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_exclusive_bound_is_no_answer(bounds, keeps_to):
    schema = {"type": "number", **bounds}
    grammar = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    for text in ("0", "-0", "0.0", "-0.0", "1", "1.0", "-1", "-1.0"):
        assert validator.is_valid(float(text)) or not keeps_to(grammar, text), text
    for text in ("0.5", "-0.5", "0.0001", "1.5", "-1.5", "-0.9"):
        assert keeps_to(grammar, text) == validator.is_valid(float(text)), text


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
WITHIN = [
    ({"minimum": -(2**63)}, ("-9223372036854774784", "0"), ("-9223372036854775809",)),
    (INT64, ("-9223372036854774784", "9223372036854774784"), ("-9223372036854775809", "9223372036854775808")),
    ({"type": "number", "minimum": -1e19, "maximum": 1e300}, ("0.5", "9223372036854774784"), ()),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5}, (str(2**53 + 2),), (str(2**53), str(2**53 + 6))),
    (
        {"type": "integer", "exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 6},
        (str(2**53 + 4),),
        (str(2**53), str(2**53 + 6)),
    ),
    (
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"}
        | {"minimum": 2**60, "exclusiveMinimum": True, "maximum": 2**61},
        (str(2**60 + 512), str(2**61)),
        (str(2**60), str(2**61 + 1)),
    ),
    ({"type": "integer", "minimum": float("-inf"), "maximum": 5}, ("5", "-5"), ("6",)),
]


@pytest.mark.parametrize(("schema", "allowed", "others"), WITHIN)
def test_large_bounds_move_inwards(schema, allowed, others, keeps_to):
    grammar = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    assert [text for text in (*allowed, *others) if keeps_to(grammar, text)] == list(allowed)


@pytest.mark.parametrize("value", [2**53, -(2**53) - 2, 2**62, 0.1, 1e22, 2**63 - 1024])
def test_value_that_is_a_float_is_served(value):
    grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps({"enum": [value, {"a": [value]}]}))


@pytest.mark.parametrize("step", [1e12, 10**6, 0.01, 1e-7, 7, 32_768, 86_400, 0.25, 0, -3])
def test_multiples_of_few_remainders_are_served(step):
    grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "number", "multipleOf": step}))


NUMBERS = {
    "maximum": {"minimum": -(2**63), "maximum": -(2**63)},
    "minimum": {"type": "integer", "minimum": 2**64},
    "exclusiveMinimum": {"exclusiveMinimum": float("inf")},
    "exclusiveMaximum": {"type": "integer", "exclusiveMaximum": -(2**63) + 1024},
    "properties.a.exclusiveMaximum": {"properties": {"a": {"exclusiveMaximum": -(10**400)}}},
    "const": {"const": 9007199254740993},
    "enum": {"enum": ["a", {"id": [10**400]}]},
    "properties.a.const": {"properties": {"a": {"const": -(2**63)}}},
    "items.allOf[0].anyOf[1].const": {"items": {"type": "array", "uniqueItems": True, "items": {"enum": [2**53 + 1]}}},
    "multipleOf": {"multipleOf": 100_000_007},
    "properties.a.multipleOf": {"properties": {"a": {"multipleOf": 0.0099991}}, "multipleOf": 2},
    "allOf[1].multipleOf": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
}


@pytest.mark.parametrize("place", NUMBERS)
def test_number_that_the_library_cannot_compute_with_is_refused(place):
    with pytest.raises(ConstraintError, match=f"with {place.rpartition('.')[2]} ") as caught:
        grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(NUMBERS[place]))
    assert str(caught.value).startswith(f"{place}: " if "." in place else "cannot enforce a schema")


def test_email_pattern_of_zod_is_equivalent(keeps_to):
    pattern = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    grammar = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": pattern}))
    validator = jsonschema.Draft202012Validator({"pattern": pattern})
    for text in (
        "a@b.de",
        "a.b@c.de",
        "o'b+c-d@x-y.co.uk",
        ".a@b.de",
        "a..b@c.de",
        "a.@b.de",
        "a'@b.de",
        "a@b",
        "@b.de",
    ):
        assert keeps_to(grammar, json.dumps(text)) == validator.is_valid(text), text


PLACES = {
    "properties.seats.uniqueItems": {"properties": {"seats": {"type": "array", "uniqueItems": True}}},
    "properties.a.items.not": {"properties": {"a": {"items": {"not": {"type": "null"}}}}},
    "anyOf[1].minProperties": {"anyOf": [{}, {"minProperties": 3}]},
    "$defs.x y.contains": {"$defs": {"x y": {"contains": {}}}, "items": {"$ref": "#/$defs/x%20y"}},
    "additionalProperties.if": {"additionalProperties": {"if": {}, "then": {}}},
    "prefixItems[0].propertyNames": {"prefixItems": [{"propertyNames": {"minLength": 1}}]},
}


@pytest.mark.parametrize("place", PLACES)
def test_refusal_names_the_place(place):
    with pytest.raises(ConstraintError) as caught:
        servable(copy.deepcopy(PLACES[place]))
    assert str(caught.value).startswith(f"{place}: cannot enforce a schema with {place.rpartition('.')[2]}")


def test_unused_definition_has_no_effect():
    assert servable({"$defs": {"a": {"not": {"type": "null"}}}, "type": "null"})


@pytest.mark.parametrize(
    "items",
    [{"$ref": [1]}, {"type": 1.5, "enum": ["a"]}, {"type": {}, "const": 1}, {"enum": [10**400, 1]}],
)
def test_malformed_schema_of_distinct_items_is_refused_or_left_to_the_library(items):
    schema = {"type": "array", "uniqueItems": True, "items": items}
    with contextlib.suppress(ConstraintError):
        grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


KEYWORDS = ("type", "items", "properties", "required", "enum", "allOf", "anyOf", "oneOf", "$ref", "not", "uniqueItems")
KEYWORDS += ("propertyNames", "discriminator", "format", "pattern", "additionalProperties", "minProperties", "maxItems")
KEYWORDS += ("minItems", "prefixItems", "$defs", "minimum", "maximum", "const", "patternProperties")


def nonsense(rng, depth=0):
    kind = rng.randrange(10 if depth < 4 else 6)
    if kind < 6:
        return rng.choice([True, False, None, 0, 1, 2.5, "array", "string", "a", "#", "#/$defs/a", [], {}])
    if kind == 6:
        return [nonsense(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice([*KEYWORDS, "a"]): nonsense(rng, depth + 1) for _ in range(rng.randrange(6))}


@pytest.mark.parametrize("kind", [ConstraintKind.JSON_SCHEMA, ConstraintKind.STRICT_JSON_SCHEMA])
@pytest.mark.parametrize("seed", range(20))
def test_random_schema_is_accepted_or_refused(kind, seed):
    rng = random.Random(seed)
    for _ in range(100):
        schema = {rng.choice(KEYWORDS): nonsense(rng) for _ in range(rng.randrange(1, 8))}
        try:
            grammar_of(kind, json.dumps(schema))
        except ConstraintError:
            continue
