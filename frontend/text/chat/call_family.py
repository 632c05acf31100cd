"""How the models of one family write tool calls: the seam between formats and what knows their marks."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from frontend.text.chat.parser import AnswerParser

JsonSchema = Mapping[str, Any]

TokenIdOf = Callable[[str], int | None]
"""The id of a special token; None for a text that is none: it is written like any other."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called.

    Attributes:
        parameters: JSON Schema of its arguments.
    """

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules for calls, in llguidance's Lark notation.

    Attributes:
        lark: the rules, `calls` the first of them.
        schemas: JSON Schemas of the arguments, by the names that the rules have for them.
        places: which tool each schema belongs to, as its index among those that may be called.
    """

    lark: str
    schemas: dict[str, dict[str, Any]]
    places: dict[str, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """What in the text of a chat template tells that its model writes a format.

    Attributes:
        any_of: groups of texts; those of one group must all be there.
        none_of: none of these may be there.
    """

    any_of: tuple[tuple[str, ...], ...]
    none_of: tuple[str, ...] = ()

    def in_template(self, template: str) -> bool:
        """Whether a template shows it."""
        shown = any(all(text in template for text in group) for group in self.any_of)
        return shown and not any(text in template for text in self.none_of)


class CallFamily(Protocol):
    """One form of tool calls."""

    @property
    def seen(self) -> Seen:
        """How a chat template shows it."""
        ...

    @property
    def marks(self) -> frozenset[str]:
        """Texts that may be special tokens of the models; the parser must be given them."""
        ...

    def parser(self, tools: Mapping[str, JsonSchema], prompt: str) -> AnswerParser:
        """A fresh parser for one answer.

        Args:
            tools: that the request offers: names, and schemas of the arguments, empty where nothing is known of them.
            prompt: the rendered prompt, or its end.
        """
        ...

    def rules(self, tools: Sequence[CallableTool], token_id: TokenIdOf, *, one_only: bool) -> CallRules:
        """Rules for an answer of at least one call, with nothing else in it.

        Args:
            tools: one of which each call names.
            token_id: of a mark.
            one_only: not more than one call.
        """
        ...


def lark_text(text: str) -> str:
    """A text in Lark's notation; empty for an empty one, which it does not take."""
    return json.dumps(text) if text else ""


def lark_sequence(text: str, marks: frozenset[str], token_id: TokenIdOf) -> str:
    """A text in Lark's notation, with those of the marks that are special tokens as tokens."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text) if marks else [text]
    return " ".join(lark_mark(piece, token_id) for piece in pieces if piece)


def lark_mark(text: str, token_id: TokenIdOf) -> str:
    """A mark in Lark's notation: a special token, or a text."""
    found = token_id(text)
    return lark_text(text) if found is None else f"<[{found}]>"


def lark_pattern(text: str) -> str:
    """A text within an expression of Lark's notation."""
    return re.escape(text).replace("/", r"\/")


_SAY_MEMBERS = ("properties", "patternProperties", "additionalProperties", "$ref", "allOf", "anyOf", "oneOf")


def arguments_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, without members if nothing is said of any."""
    says_members = any(keyword in parameters for keyword in _SAY_MEMBERS)
    return {"type": "object", **({} if says_members else {"properties": {}}), **parameters}
