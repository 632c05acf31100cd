"""GLM's arguments: the tool's schema determines their types."""

import json

import pytest

SCHEMA = {
    "$defs": {"Unit": {"type": "string", "enum": ["C", "F"]}},
    "properties": {
        "city": {"type": "string"},
        "unit": {"$ref": "#/$defs/Unit"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flags": {"type": ["array", "string"]},
        "any": {},
        "level": {"enum": [1, 2]},
        "deep": {"allOf": [{"type": "object"}]},
        "self": {"$ref": "#/properties/self"},
    },
}
VALUES = [
    ("city", "12", "12"),
    ("city", '"quoted"', '"quoted"'),
    ("city", ' a\nb\t"<\\ ', ' a\nb\t"<\\ '),
    ("city", "", ""),
    ("unit", "C", "C"),
    ("days", "3", 3),
    ("days", " 3\n", 3),
    ("days", "three", "three"),
    ("ratio", "3", 3),
    ("ratio", "0.5", 0.5),
    ("note", "null", None),
    ("note", "12", "12"),
    ("note", "words", "words"),
    ("flags", "[1]", [1]),
    ("flags", "1", "1"),
    ("any", "true", True),
    ("any", "true!", "true!"),
    ("any", "NaN", "NaN"),
    ("any", "", ""),
    ("level", "2", 2),
    ("deep", '{"a": "</tool_call>"}', {"a": "</tool_call>"}),
    ("self", "1", 1),
    ("unknown", "1.5", 1.5),
    ("unknown", "1" * 5000, "1" * 5000),
    ('odd "key"', "x", "x"),
]


@pytest.mark.parametrize(("key", "written", "meant"), VALUES)
def test_value_is_text_or_json_as_the_schema_says(parse, key, written, meant):
    text = f"<tool_call>get\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    whole = parse("glm45", text, names={"get": SCHEMA})
    assert whole[0] == ("call", 0, "get")
    assert json.loads(whole[1][2]) == {key: meant}
    assert parse("glm45", text, names={"get": SCHEMA}, cuts=range(len(text))) == whole


def test_call_without_arguments_may_be_followed_by_another(parse):
    text = (
        "Well.\n<tool_call>get</tool_call>\n<tool_call>put\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>."
    )
    assert parse("glm45", text) == [
        ("content", "Well."),
        ("call", 0, "get"),
        ("arguments", 0, "{}"),
        ("call", 1, "put"),
        ("arguments", 1, '{"a": 1}'),
        ("content", "."),
    ]


BROKEN = [
    ("<tool_call>get<arg_key>a</arg_key>oops</tool_call>", {}, "oops</tool_call>"),
    ("<tool_call>get<arg_key>a</arg_key><arg_value>1</arg_value> and more", {"a": 1}, "and more"),
    ("<tool_call>get<arg_key>a</arg_key><arg_value>1</arg_value><tool_call>", {"a": 1}, "<tool_call>"),
]


@pytest.mark.parametrize(("text", "arguments", "rest"), BROKEN)
def test_unexpected_text_ends_a_call(parse, text, arguments, rest):
    for cuts in ((), range(len(text))):
        call, (_, _, written), content = parse("glm45", text, cuts=cuts)
        assert call == ("call", 0, "get")
        assert json.loads(written) == arguments
        assert content == ("content", rest)


def test_circular_schema_is_resolved_quickly(parse):
    schema = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"} for _ in range(300)]}}}
    schema["properties"] = {"x": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}}
    text = "<tool_call>get<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    assert parse("glm45", text, names={"get": schema})[1] == ("arguments", 0, '{"x": 1}')
