"""Converts output constraints to grammars in llguidance's JSON format."""

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from chairlift.service.engine_protocol import MAX_GRAMMAR_CHARS
from chairlift.service.structured.closed_objects import close_objects
from chairlift.service.structured.output_constraint import ConstraintError, ConstraintKind
from chairlift.service.structured.schema_rules import JSON_OPTIONS, servable

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_UNICODE_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


def grammar_of(kind: ConstraintKind, text: str, before: str = "") -> str:
    """Returns the grammar of a constraint; see `OutputConstraint`.

    Raises:
        ConstraintError: the constraint is invalid, as far as this shows without a tokenizer.
    """
    grammars = _grammars(kind, text)
    if before:
        grammars[0]["name"] = "constraint"
        grammars.insert(0, {"lark_grammar": f"start: before @constraint\n{before}"})
    try:
        grammar = json.dumps({"grammars": grammars}, allow_nan=False)
    except ValueError:
        raise ConstraintError("it has a number that is not finite, such as 1e999 or NaN") from None
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ConstraintError(f"its grammar has {len(grammar):,} characters, more than {MAX_GRAMMAR_CHARS:,}")
    return grammar


def parts_of(kind: ConstraintKind, text: str) -> Iterator[tuple[str, str]]:
    """Yields the grammars of a constraint's schemas with their names for the client; none if it has no parts."""
    places = json.loads(text)["places"] if kind is ConstraintKind.PARTS else {}
    for grammar in _grammars(kind, text) if places else ():
        if grammar.get("name") in places:
            yield places[grammar.pop("name")], json.dumps({"grammars": [grammar]})


def _grammars(kind: ConstraintKind, text: str) -> list[dict[str, Any]]:
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            return [_schema_grammar(_loaded(text))]
        case ConstraintKind.STRICT_JSON_SCHEMA:
            return [_schema_grammar(_loaded(text), closed=True)]
        case ConstraintKind.JSON_OBJECT:
            return [_schema_grammar({"type": "object"})]
        case ConstraintKind.REGEX:
            grammars: list[dict[str, Any]] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            return grammars
        case ConstraintKind.CHOICE:
            choices = dict.fromkeys(json.loads(text))
            lark = "start: " + " | ".join(_quoted(choice) for choice in choices)
            return [{"lark_grammar": lark}]
        case ConstraintKind.GRAMMAR:
            return [{"lark_grammar": _lark(text)}]
        case ConstraintKind.PARTS:
            parts = json.loads(text)
            closed, places = parts["closed"], parts["places"]
            schemas = [
                {"name": name, **_schema_grammar(schema, closed=name in closed, place=places.get(name, ""))}
                for name, schema in parts["schemas"].items()
            ]
            return [{"lark_grammar": parts["lark"]}, *schemas]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ConstraintError("it is nested too deeply") from None
    except ValueError as error:
        raise ConstraintError(f"it is not valid JSON: {error}") from None


def _schema_grammar(schema: Any, *, closed: bool = False, place: str = "") -> dict[str, Any]:
    try:
        if not isinstance(schema, dict):
            raise ConstraintError("a schema must be a JSON object")
        if closed:
            close_objects(schema)
        schema = servable(schema)
    except ConstraintError as error:
        raise ConstraintError(f"{place}: {error}" if place else str(error)) from None
    return {"json_schema": {**schema, "x-guidance": JSON_OPTIONS}}


def _quoted(text: str) -> str:
    """Returns a text as a Lark string, which has JSON's notation."""
    return json.dumps(text)  # non-ASCII is escaped, and DEL, which the library rejects in a string


def _lark(text: str) -> str:
    if not _GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(_UNICODE_ESCAPE.sub(_unescaped, text))
    except (GbnfToLarkError, RecursionError) as error:
        raise ConstraintError(f"it is not GBNF: {error}") from None
    except Exception as error:  # the library raises bare Exception for rules that are missing or named alike
        raise ConstraintError(f"it is not GBNF: {error}") from None


def _unescaped(match: re.Match[str]) -> str:
    r"""A character in the place of its \u or \U: the library's conversion loses leading zeros."""
    char = chr(int(match[2] or match[3], 16))
    if char.isascii() and not char.isalnum():
        return f"{match[1]}\\x{ord(char):02x}"  # may mean something in a class or a literal
    return match[1] + char
