"""Grammars of arrays with distinct items: all listed arrays are valid; few values are listed in every order."""

import json
import random

import jsonschema
import pytest

from chairlift.service.structured.grammars import grammar_of
from chairlift.service.structured.output_constraint import ConstraintError, ConstraintKind
from chairlift.service.structured.unique_items import MAX_ARRAYS, NotEnumerable, distinct_arrays

LETTERS = [{"enum": list("abcdefghijklmnopqrstuvwxyz"[:number])} for number in range(27)]


def unique(items, **others):
    return {"type": "array", "items": items, "uniqueItems": True, **others}


DRAWN = {
    "enum": unique(LETTERS[3]),
    "enum in an order of its own": unique(LETTERS[8]),
    "bounds": unique(LETTERS[12], minItems=1, maxItems=2),
    "numbers that are equal": unique({"enum": [1, 1.0, True, "1", 2]}),
    "range": unique({"type": "integer", "minimum": -1, "exclusiveMaximum": 4}, maxItems=3),
    "booleans": unique({"type": "boolean"}, minItems=2),
    "reference": {"$defs": {"e": {"type": "string", "enum": ["x", "y"]}}, **unique({"$ref": "#/$defs/e"})},
    "alternatives": unique({"anyOf": [{"const": None}, {"type": "boolean", "title": "B"}]}),
    "one reference": {"$defs": {"e": {"const": 1}}, **unique({"allOf": [{"$ref": "#/$defs/e"}], "default": 1})},
    "at most one": unique({"type": "string", "maxLength": 3}, maxItems=1),
    "or null": unique({"type": "boolean"}, type=["array", "null"]),
    "of any type": {"items": {"type": "boolean"}, "uniqueItems": True},
    "beside alternatives": unique(LETTERS[3], anyOf=[{"minItems": 1}, {"maxItems": 3}]),
    "not meant": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False, "maxItems": 5},
    "of enum with another type": unique({"type": "string", "enum": ["a", 1, "b"]}),
    "objects": unique({"enum": [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": []}]}),
}


@pytest.mark.parametrize("case", DRAWN)
def test_drawn_arrays_have_distinct_items(case, draw):
    grammar, rng = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(DRAWN[case])), random.Random(case)
    texts = {text for _ in range(8) if (text := draw(grammar, rng, max_tokens=300)) is not None}
    assert texts
    for text in texts:
        jsonschema.Draft202012Validator(DRAWN[case]).validate(json.loads(text))


@pytest.mark.parametrize("number", range(6))
def test_few_values_are_listed_in_every_order(number):
    arrays = distinct_arrays({}, unique(LETTERS[number]))
    expected = {()} | {
        (*array, value) for array in map(tuple, arrays) for value in LETTERS[number]["enum"] if value not in array
    }
    assert set(map(tuple, arrays)) == expected
    assert len(arrays) == len(expected)


@pytest.mark.parametrize("number", range(6, 11))
def test_more_values_are_listed_in_the_order_of_the_schema(number):
    arrays = distinct_arrays({}, unique(LETTERS[number]))
    assert len(arrays) == 2**number <= MAX_ARRAYS
    assert all(array == sorted(set(array)) for array in arrays)


def test_small_bounds_allow_more_values():
    assert len(distinct_arrays({}, unique(LETTERS[26], maxItems=2))) == 1 + 26 + 26 * 25
    assert len(distinct_arrays({}, unique(LETTERS[26], minItems=2, maxItems=2))) == 26 * 25


REFUSED = [
    unique({"type": "string"}),
    unique({"type": "string"}, maxItems=2),
    unique({}),
    unique(LETTERS[11]),
    unique({"type": "integer", "minimum": 0}),
    unique({"type": "integer", "minimum": 0, "maximum": 5.5}),
    unique({"enum": ["a", "bb"], "maxLength": 1}),
    unique({"$ref": "#"}),
    {"type": "array", "prefixItems": [{"const": 1}], "uniqueItems": True},
    {"type": "array", "uniqueItems": True},
]


@pytest.mark.parametrize("schema", REFUSED, ids=str)
def test_arrays_that_cannot_be_listed_are_refused(schema):
    with pytest.raises(NotEnumerable):
        distinct_arrays(schema, schema)
    with pytest.raises(ConstraintError, match=r"^cannot enforce a schema with uniqueItems .+$"):
        grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def chain(num_definitions, num_references):
    """Returns definitions of which each refers to the next one so many times; the last one has two values."""
    definitions = {
        f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * num_references}
        for number in range(num_definitions)
    }
    return {"$defs": definitions | {f"d{num_definitions}": {"enum": [1, 2]}}, **unique({"$ref": "#/$defs/d0"})}


@pytest.mark.timeout(60)  # following each of the 2^40 paths takes longer
def test_a_definition_that_is_referred_to_on_many_paths_is_read_once():
    schema = chain(40, num_references=2)
    assert distinct_arrays(schema, schema) == [[], [1], [2], [1, 2], [2, 1]]


def test_references_that_are_nested_too_deeply_are_refused():
    schema = chain(10_000, num_references=1)
    with pytest.raises(NotEnumerable, match="nested too deeply"):
        distinct_arrays(schema, schema)


def test_a_definition_that_contains_itself_has_no_end_of_values():
    schema = {"$defs": {"a": {"anyOf": [{"const": 1}, {"$ref": "#/$defs/a"}]}}, **unique({"$ref": "#/$defs/a"})}
    with pytest.raises(NotEnumerable, match="unless maxItems"):
        distinct_arrays(schema, schema)


@pytest.mark.timeout(60)  # to add up their numbers takes longer: the last one has 200,000 digits
def test_tens_of_thousands_of_values_are_refused_at_once():
    with pytest.raises(NotEnumerable, match="of 50000 values: more than 1,024 arrays"):
        distinct_arrays({}, unique({"enum": list(range(50_000))}))


@pytest.mark.timeout(60)  # to copy them takes longer, and gigabytes
def test_values_that_definitions_multiply_are_refused_before_they_are_copied():
    definitions = {"e": {"enum": list(range(9_000))}, "f": {"anyOf": [{"$ref": "#/$defs/e"}] * 6_000}}
    schema = {"$defs": definitions, **unique({"$ref": "#/$defs/f"})}
    with pytest.raises(NotEnumerable, match="of 9000 values: more than 1,024 arrays"):
        distinct_arrays(schema, schema)
