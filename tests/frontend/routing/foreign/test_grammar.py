"""Grammars in the form of other engines, compiled by llguidance itself: they allow the same texts."""

import json

import pytest
from llguidance import LLMatcher

from chairlift.service.structured.grammars import grammar_of
from chairlift.service.structured.output_constraint import ConstraintKind
from frontend.routing.foreign.grammar import portable

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x@y", "b"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def validates(grammar):
    return not LLMatcher.validate_grammar(grammar)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ConstraintKind.REGEX, r"[a-z]+@[a-z]+/\d+"),
        (ConstraintKind.CHOICE, '["a@b", "c/d@e"]'),
        (ConstraintKind.GRAMMAR, 'root ::= "yes@no " | "no " [0-9]+'),
        (ConstraintKind.GRAMMAR, 'start: "a" word\nword: /[b-z@]+/'),
    ],
)
def test_rules_stay_as_they_are(kind, text):
    original = json.loads(grammar_of(kind, text))["grammars"][0]["lark_grammar"]
    lark = portable(grammar_of(kind, text)).lark
    assert lark.split() == original.replace("%llguidance {}", "").split()
    assert validates(LLMatcher.grammar_from_lark(lark))


def test_a_schema_alone_is_one_that_an_engine_of_ours_reads_too():
    """Such an engine, with --api vllm, rewrites schemas itself."""
    sent = portable(grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))).json_schema
    assert portable(grammar_of(ConstraintKind.JSON_SCHEMA, sent)).json_schema == sent


def test_a_schema_alone_stays_a_schema():
    converted = portable(grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    assert not converted.lark
    assert json.loads(converted.json_schema)["properties"] == SCHEMA["properties"]
    assert validates(LLMatcher.grammar_from_json_schema(converted.json_schema))


def test_references_become_rules_of_one_text():
    lark = 'start: "call@1 " @first | "other " @second'
    parts = {"lark": lark, "schemas": {"first": SCHEMA, "second": {"type": "integer"}}, "closed": [], "places": {}}
    converted = portable(grammar_of(ConstraintKind.PARTS, json.dumps(parts))).lark
    assert converted.startswith('start: "call@1 " part_first | "other " part_second')
    assert "part_second: %json" in converted
    assert validates(LLMatcher.grammar_from_lark(converted))


@pytest.mark.parametrize("kind", [ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX])
def test_rules_before_the_constraint_are_kept(kind):
    text = json.dumps(SCHEMA) if kind is ConstraintKind.JSON_SCHEMA else "[0-9]+"
    converted = portable(grammar_of(kind, text, 'before: /[a-z]+/ "\\n"')).lark
    assert converted.startswith("start: before part_constraint")
    assert validates(LLMatcher.grammar_from_lark(converted))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"grammars": []}', '{"grammars": [{"other": 1}]}', "null"])
def test_other_forms_are_refused(text):
    with pytest.raises(ValueError):
        portable(text)
