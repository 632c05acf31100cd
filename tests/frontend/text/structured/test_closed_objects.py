"""Objects are closed where nothing that the schema describes is lost."""

import json

import jsonschema
import pytest

from chairlift.service.structured.closed_objects import close_objects

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


def closed(schema):
    result = json.loads(json.dumps(schema))  # no part of it twice
    close_objects(result)
    return result


CLOSED = {
    "object": A,
    "no members": {"type": "object", "properties": {}},
    "in a member": {"properties": {"x": A}},
    "in an array": {"items": A},
    "in a tuple": {"prefixItems": [A]},
    "in alternatives": {"anyOf": [A, B, {"type": "null"}]},
    "as values": {"additionalProperties": A},
    "by reference": {"$defs": {"a": A}, "$ref": "#/$defs/a"},
    "by one reference with a description": {"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}], "description": "x"},
    "by anchor": {"$defs": {"a": {**A, "$anchor": "x"}}, "$ref": "#x"},
    "beside conditions on the same members": {**A, "anyOf": [{"required": ["a"]}, {"maxProperties": 0}]},
    "recursive": {"properties": {"next": {"$ref": "#"}}},
}


def objects_of(schema):
    """All schemas with members."""
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    own = [schema] if isinstance(schema, dict) and isinstance(schema.get("properties"), dict) else []
    return own + [found for part in parts for found in objects_of(part)]


@pytest.mark.parametrize("case", CLOSED)
def test_object_with_properties_is_closed(case):
    found = objects_of(closed(CLOSED[case]))
    assert found
    assert all(schema["additionalProperties"] is False for schema in found)


UNCHANGED = {
    "free-form object": {"type": "object"},
    "says what else": {**A, "additionalProperties": {"type": "string"}},
    "says that there is more": {**A, "additionalProperties": True},
    "both": {"allOf": [A, B]},
    "more than what is referred to": {"$defs": {"a": A}, "$ref": "#/$defs/a", "properties": {"b": {}}},
    "alternatives that add members": {**A, "anyOf": [B, {"properties": {"c": {}}}]},
    "through references": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": A}, "allOf": [{"$ref": "#/$defs/a"}, B]},
    "no schema": {"properties": 1, "allOf": 2, "anyOf": {}, "$ref": 3, "required": 4},
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_object_that_closing_would_restrict_stays_open(case):
    assert closed(UNCHANGED[case]) == UNCHANGED[case]


def test_required_undeclared_property_is_allowed():
    schema = closed({**A, "required": ["a", "x"]})
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"a": 1, "x": [2]})
    assert not validator.is_valid({"a": 1, "x": 2, "y": 3})


def test_object_with_both_open_and_closed_parts_keeps_the_rest_closed():
    schema = closed({"properties": {"both": {"allOf": [A, B]}, "one": A}})
    assert schema["additionalProperties"] is False
    assert schema["properties"]["one"]["additionalProperties"] is False
    assert "additionalProperties" not in schema["properties"]["both"]["allOf"][0]


def test_a_chain_of_references_is_followed_once():
    """Not from each of its links to the end."""
    num_looks = 0

    class Link(dict):
        def get(self, *args):
            nonlocal num_looks
            num_looks += 1
            return super().get(*args)

    links = {str(i): Link({"$ref": f"#/$defs/{i + 1}"}) for i in range(300)}
    close_objects({"$ref": "#/$defs/0", "$defs": {**links, "300": A}})
    assert num_looks < 300 * 100
