"""The forms that an answer may be held to. Pure: knows no proto, no library, no process."""

import enum
from dataclasses import dataclass


class FormError(Exception):
    """A form that cannot be had; says why, for the client."""


class FormKind(enum.StrEnum):
    """How the text of a form is to be read."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema."""
    JSON_OBJECT = "json_object"
    """Nothing is to be read: any JSON object."""
    REGEX = "regex"
    """A regular expression."""
    CHOICE = "choice"
    """A JSON list of texts."""
    GRAMMAR = "grammar"
    """Lark or GBNF."""
    PARTS = "parts"
    """A JSON object: `lark`, a grammar, and `schemas`, from the names that it refers to as `@name` to JSON Schemas."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What an answer is held to.

    Attributes:
        kind: how to read `text`.
        text: the form.
        field: what errors name: the request's field that holds it.
        before: rules in Lark's notation for what comes before the form, of which `before` is the first; empty: nothing.
    """

    kind: FormKind
    text: str
    field: str
    before: str = ""
