"""The forms that an answer may be held to. Pure: knows no proto, no library, no process."""

import enum
from dataclasses import dataclass


class FormError(Exception):
    """A form that cannot be had; says why, for the client."""


class FormKind(enum.StrEnum):
    """How the text of a form is to be read."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema."""
    STRICT_JSON_SCHEMA = "strict_json_schema"
    """The same, with objects closed: see `closed_objects`."""
    JSON_OBJECT = "json_object"
    """Nothing is to be read: any JSON object."""
    REGEX = "regex"
    """A regular expression."""
    CHOICE = "choice"
    """A JSON list of texts."""
    GRAMMAR = "grammar"
    """Lark or GBNF."""
    PARTS = "parts"
    """A JSON object:
    `lark`, a grammar;
    `schemas`, from the names that it refers to as `@name` to JSON Schemas;
    `closed`, the names of those whose objects are closed, see `closed_objects`;
    `places`, from names to what errors call these schemas; those that are not in it have no name for a client.
    """


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
