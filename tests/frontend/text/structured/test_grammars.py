"""Grammars of constraints: texts that they allow and forbid, and schemas that are refused."""

import json
import random
import re
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLTokenizer

from chairlift.service.structured.grammars import grammar_of
from chairlift.service.structured.output_constraint import ConstraintError, ConstraintKind
from chairlift.service.structured.schema_rules import FORMATS
from frontend.text.structured.trial import Trial
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files

ROOT = Path(__file__).parents[4]
SCHEMAS = json.loads((ROOT / "tests/json_schemas.json").read_text())
DOCS = (ROOT / "docs/structured-output.md").read_text()


def schema_grammar(schema) -> str:
    return grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


@pytest.fixture(scope="module")
def compiled():
    """compiled(grammar) checks that a grammar compiles, and returns it."""
    trial = Trial(LLTokenizer(byte_tokenizer_files()["tokenizer.json"].decode(), n_vocab=258, eos_token=[256]))

    def check(grammar: str) -> str:
        trial.run(grammar)
        return grammar

    return check


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_drawn_from_a_schema_are_valid(name, compiled, draw):
    schema = SCHEMAS[name]
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    grammar, rng = compiled(schema_grammar(schema)), random.Random(name)
    texts = [draw(grammar, rng) for _ in range(20)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 10
    for text in ended:
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


def keyword_cases():
    """Returns a schema for each keyword of JSON Schema 2020-12 and some of older drafts."""
    number, text, things, members = ({"type": kind} for kind in ("number", "string", "array", "object"))
    return {
        "additionalItems": {"$schema": "http://json-schema.org/draft-07/schema#", **things, "items": [{}]}
        | {"additionalItems": False},
        "additionalProperties": {**members, "additionalProperties": number},
        "allOf": {"allOf": [number, {"minimum": 1}]},
        "anyOf": {"anyOf": [number, text]},
        "const": {"const": 1},
        "contains": {**things, "contains": number},
        "dependencies": {**members, "dependencies": {"a": ["b"]}},
        "dependentRequired": {**members, "dependentRequired": {"a": ["b"]}},
        "dependentSchemas": {**members, "dependentSchemas": {"a": members}},
        "$dynamicRef": {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}},
        "else": {"if": number, "else": {"minimum": 1}},
        "enum": {"enum": [1, "a"]},
        "exclusiveMaximum": {**number, "exclusiveMaximum": 1},
        "exclusiveMinimum": {**number, "exclusiveMinimum": 1},
        "if": {"if": number, "then": {"minimum": 1}},
        "items": {**things, "items": number},
        "maxContains": {**things, "contains": number, "maxContains": 2},
        "maximum": {**number, "maximum": 1},
        "maxItems": {**things, "maxItems": 1},
        "maxLength": {**text, "maxLength": 1},
        "maxProperties": {**members, "maxProperties": 1},
        "minContains": {**things, "contains": number, "minContains": 2},
        "minimum": {**number, "minimum": 1},
        "minItems": {**things, "minItems": 1},
        "minLength": {**text, "minLength": 1},
        "minProperties": {**members, "minProperties": 1},
        "multipleOf": {"type": "integer", "multipleOf": 3},
        "not": {"not": number},
        "oneOf": {"oneOf": [number, text]},
        "pattern": {**text, "pattern": "a"},
        "patternProperties": {**members, "patternProperties": {"^a": number}},
        "prefixItems": {**things, "prefixItems": [number]},
        "properties": {**members, "properties": {"a": number}},
        "propertyNames": {**members, "propertyNames": {"maxLength": 3}},
        "$ref": {"$ref": "#/$defs/a", "$defs": {"a": number}},
        "required": {**members, "required": ["a"]},
        "then": {"if": number, "then": {"minimum": 1}},
        "type": number,
        "unevaluatedItems": {**things, "unevaluatedItems": False},
        "unevaluatedProperties": {**members, "unevaluatedProperties": False},
        "uniqueItems": {**things, "uniqueItems": True},
        "x-guidance": {"x-guidance": {"lenient": True}},
    }


def documented(heading: str) -> set[str]:
    """Returns the words in backquotes of one line in the docs."""
    (line,) = re.findall(rf"^- \*\*{heading}\*\*: (.*)$", DOCS, re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", line))


def refused(schema, compiled) -> str:
    """Returns why a schema is refused; empty if it is not."""
    try:
        compiled(schema_grammar(schema))
    except ConstraintError as error:
        return str(error)
    return ""


def test_docs_list_enforced_and_refused_keywords(compiled):
    errors = {name: refused(schema, compiled) for name, schema in keyword_cases().items()}
    assert documented("Enforced") == {name for name, error in errors.items() if not error}
    assert documented("Refused") == {name for name, error in errors.items() if error}
    for name, error in errors.items():
        assert not error or re.search(rf"with (.+, )?{re.escape(name)}\b", error), error


def test_docs_list_enforced_formats_and_others_are_annotations(compiled, keeps_to):
    formats = [
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
    ]
    formats += ["uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"]
    formats += ["relative-json-pointer", "regex"]
    formats += ["path", "password", "binary", "byte", "ip", "json-string", "int32", "x"]
    assert all(not refused({"type": "string", "format": name}, compiled) for name in formats)
    enforced = {name for name in formats if not keeps_to(schema_grammar({"type": "string", "format": name}), '"~ "')}
    assert documented("Enforced formats") == enforced == FORMATS


UNSATISFIABLE = {
    "bounds": {"type": "integer", "minimum": 5, "maximum": 3},
    "lengths": {"type": "string", "minLength": 5, "maxLength": 3},
    "items": {"type": "array", "minItems": 5, "maxItems": 3},
    "types": {"allOf": [{"type": "integer"}, {"type": "string"}]},
    "required and forbidden": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "nothing to choose": {"enum": []},
    "no integer between": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
    "only itself": {"$ref": "#"},
    "one another": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
}


@pytest.mark.parametrize("case", UNSATISFIABLE)
def test_unsatisfiable_schema_is_refused(case, compiled):
    assert re.match("Unsatisfiable schema|no text satisfies it", refused(UNSATISFIABLE[case], compiled))


NO_SCHEMA = {
    "no JSON": ("{", "not valid JSON"),
    "no finite number": ('{"enum": [1e999]}', "a number that is not finite, such as 1e999 or NaN"),
    "no finite step": ('{"type": "number", "multipleOf": 1e999}', "a number that is not finite"),
    "no number": ('{"default": [NaN]}', "a number that is not finite, such as 1e999 or NaN"),
    "no object": ("true", "must be a JSON object"),
    "nested without end": ('{"not":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "nested deeply": ('{"properties":{"a":' * 100 + "{}" + "}}" * 100, "recursion limit"),
    "unknown type": ('{"type": "intger"}', "intger"),
    "reference elsewhere": ('{"$ref": "http://example.com/a"}', "example.com"),
    "reference to nothing": ('{"$ref": "#/$defs/a"}', "does not exist"),
    "options": ('{"properties": {"a": {"minProperties": 2}}}', "minProperties 2"),
    "overlapping oneOf": ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf constraints"),
}


@pytest.mark.parametrize("case", NO_SCHEMA)
def test_invalid_schema_is_refused(case, compiled):
    text, words = NO_SCHEMA[case]
    with pytest.raises(ConstraintError, match=re.escape(words)):
        compiled(grammar_of(ConstraintKind.JSON_SCHEMA, text))


HIDDEN = {
    "in an example": {"$ref": "#/examples/0", "examples": [{"type": "object", "minProperties": 3}]},
    "in a default": {"$defs": {"a": {"default": {"minProperties": 3}}}, "$ref": "#/$defs/a/default"},
    "under escaped names": {"$ref": "#/default/a~1b/c%20d", "default": {"a/b": {"c d": {"minProperties": 3}}}},
    "under an address": {"$id": "http://a/b", "$ref": "http://a/b#/default", "default": {"minProperties": 3}},
    "behind another": {"$ref": "#/default", "default": {"$ref": "#/examples/0"}, "examples": [{"minProperties": 3}]},
}


@pytest.mark.parametrize("case", HIDDEN)
def test_unsupported_keyword_is_found_behind_any_reference(case, compiled):
    assert "minProperties 3" in refused(HIDDEN[case], compiled)


def test_required_properties_count_towards_min_properties(compiled):
    assert not refused({"type": "object", "minProperties": 2, "required": ["a", "b"]}, compiled)
    assert "minProperties 3" in refused({"type": "object", "minProperties": 3, "required": ["a", "b"]}, compiled)


def test_whitespace_in_json_is_a_blank_or_an_indented_line(keeps_to):
    grammar = schema_grammar({"type": "array", "items": {"type": "integer"}})
    for text in ("[1,2]", "[1, 2]", "[\n  1,\n  2\n]"):
        assert keeps_to(grammar, text)
    for text in ("[1,  2]", " [1]", "[1]\n", "[\n\n1]", "[\n" + " " * 33 + "1]"):
        assert not keeps_to(grammar, text)


CHOICES = [*"abe", "ab", 'q"\\/\n\t\r\b\f\0\1\x7f\u2028é😀', "<|end|>", "/x/", "'", "a | b", "{}", "%json", "@a", "$"]


def test_choice_allows_exactly_its_texts(compiled, keeps_to):
    grammar = compiled(grammar_of(ConstraintKind.CHOICE, json.dumps(CHOICES)))
    assert all(keeps_to(grammar, text) for text in CHOICES)
    assert not any(keeps_to(grammar, text) for text in ("", "c", "aa", "a |", "<|end"))


def test_thousand_choices_compile(compiled, draw):
    choices = [f"number {number} of them all" for number in range(1000)]
    assert draw(compiled(grammar_of(ConstraintKind.CHOICE, json.dumps(choices))), random.Random(1)) in choices


REGEXES = {
    r"[a-z]+/\d{2}\"x\"": (['ab/12"x"'], ["ab", '/12"x"']),
    r"^é\p{L}+$": (["éß"], ["é", "eß"]),
    "a\nb": (["a\nb"], ["ab"]),
    "(?:yes|no)?": (["yes", "no", ""], ["yesno"]),
}


@pytest.mark.parametrize("regex", REGEXES)
def test_regex_is_matched_by_the_whole_answer(regex, compiled, keeps_to):
    grammar = compiled(grammar_of(ConstraintKind.REGEX, regex))
    right, wrong = REGEXES[regex]
    assert all(keeps_to(grammar, text) for text in right)
    assert not any(keeps_to(grammar, text) for text in wrong)


GBNF = r"""
# a comment
root ::= greeting "," [ ] some-name+
greeting ::= "hi" | "\u0041h" | "\U0001F600" | "\\u0041" | "\x22"
some-name ::= [\u0061-\u0063] | [^\x00-\u007f]
"""


def test_gbnf_is_detected_and_its_escapes_are_kept(compiled, keeps_to):
    grammar = compiled(grammar_of(ConstraintKind.GRAMMAR, GBNF))
    for text in ("hi, a", "Ah, abc", "😀, é", "\\u0041, b", '", c'):
        assert keeps_to(grammar, text)
    for text in ("hi,a", "hi, ", "hi, d", "h, a"):
        assert not keeps_to(grammar, text)


@pytest.mark.timeout(60)  # a search that begins again at each of them takes longer, and holds the GIL
@pytest.mark.parametrize("blank", ["\n", " ", "\t", " \n", "\r\n"])
def test_gbnf_is_found_behind_many_blanks(blank):
    blanks = blank * (100_000 // len(blank))
    assert "root" not in grammar_of(ConstraintKind.GRAMMAR, f'{blanks}root ::= "a"')
    assert "start: NAME" in grammar_of(ConstraintKind.GRAMMAR, f"{blanks}start: NAME")


def test_lark_grammar_may_recurse(compiled, keeps_to):
    grammar = compiled(grammar_of(ConstraintKind.GRAMMAR, 'start: "(" start ")" | NAME\nNAME: /[a-z]+/'))
    assert keeps_to(grammar, "((ab))")
    assert not keeps_to(grammar, "((ab)")


CONSTRAINTS = {
    ConstraintKind.REGEX: ("a+", "aa"),
    ConstraintKind.JSON_SCHEMA: ('{"type": "integer"}', "12"),
    ConstraintKind.STRICT_JSON_SCHEMA: ('{"type": "integer"}', "12"),
    ConstraintKind.JSON_OBJECT: ("", "{}"),
    ConstraintKind.CHOICE: ('["x"]', "x"),
    ConstraintKind.GRAMMAR: ('%llguidance {}\nstart: "a" b\nb: "c"', "ac"),
    ConstraintKind.PARTS: (
        '{"lark": "start: @f", "schemas": {"f": {"type": "integer"}}, "closed": [], "places": {}}',
        "12",
    ),
}


@pytest.mark.parametrize("kind", ConstraintKind)
def test_rules_before_the_constraint_work_with_each_kind(kind, compiled, keeps_to):
    constraint, text = CONSTRAINTS[kind]
    grammar = compiled(grammar_of(kind, constraint, 'before: "so: "'))
    assert keeps_to(grammar, "so: " + text)
    assert not keeps_to(grammar, text)
