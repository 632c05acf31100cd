"""Structured output: the constraint that an answer must match. Pure: no proto, library or process."""

import enum
from dataclasses import dataclass


class ConstraintError(Exception):
    """The constraint cannot be enforced; the message is for the client."""


class ConstraintKind(enum.StrEnum):
    """How the text of a constraint is interpreted."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema."""
    STRICT_JSON_SCHEMA = "strict_json_schema"
    """A JSON Schema whose objects are closed; see `closed_objects`."""
    JSON_OBJECT = "json_object"
    """Any JSON object; the text is empty."""
    REGEX = "regex"
    """A regular expression."""
    CHOICE = "choice"
    """A JSON list of texts."""
    GRAMMAR = "grammar"
    """Lark or GBNF."""
    PARTS = "parts"
    """A JSON object:
    `lark`, a grammar;
    `schemas`, JSON Schemas by the names that the grammar refers to as `@name`;
    `closed`, names of the schemas whose objects are closed, see `closed_objects`;
    `places`, names of the schemas in errors; a schema without one is unknown to the client.
    """


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """A constraint that an answer must match.

    Attributes:
        kind: how to interpret `text`.
        text: the schema, expression or grammar.
        field: the request's field, for errors.
        before: Lark rules for text before the constrained part, `before` is the first; empty: none.
    """

    kind: ConstraintKind
    text: str
    field: str
    before: str = ""
