"""The interface of tool call formats, and helpers for their grammar rules."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from frontend.text.chat.parser import AnswerParser

JsonSchema = Mapping[str, Any]

TokenIdOf = Callable[[str], int | None]
"""Returns the id of a special token; None if the text is not one."""


TOOL_NAME = r"[\w.\-]{1,128}"
"""Pattern of a tool's name. OpenAI's API allows 64 characters, Anthropic's 128."""


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
        lark: the rules; `calls` is the first.
        schemas: JSON Schemas of the arguments by their names in the rules.
        places: index of each schema's tool among the callable tools.
    """

    lark: str
    schemas: dict[str, dict[str, Any]]
    places: dict[str, int]

    @classmethod
    def with_json_arguments(cls, lark: str, tools: Sequence[CallableTool]) -> "CallRules":
        """Returns rules in which `arguments_0`, `arguments_1`, ... are the JSON arguments of the tools."""
        schemas = {f"arguments_{index}": _arguments_schema(tool.parameters) for index, tool in enumerate(tools)}
        return cls(lark, schemas, {name: index for index, name in enumerate(schemas)})


@dataclass(frozen=True, slots=True)
class TemplateSigns:
    """Texts in a chat template that identify a format.

    Attributes:
        any_of: groups of texts; all texts of one group must be present.
        none_of: texts that must be absent.
    """

    any_of: tuple[tuple[str, ...], ...]
    none_of: tuple[str, ...] = ()

    def in_template(self, template: str) -> bool:
        """Returns whether a template has these signs."""
        shown = any(all(text in template for text in group) for group in self.any_of)
        return shown and not any(text in template for text in self.none_of)


class CallFamily(Protocol):
    """One format of tool calls."""

    @property
    def seen(self) -> TemplateSigns:
        """Signs of the format in a chat template."""
        ...

    @property
    def marks(self) -> frozenset[str]:
        """Marks that may be special tokens; the parser needs them in its text."""
        ...

    def parser(self, tools: Mapping[str, JsonSchema], prompt: str) -> AnswerParser:
        """Returns a parser for one answer.

        Args:
            tools: offered tools: names, and schemas of the arguments, empty if unknown.
            prompt: the rendered prompt, or its end.
        """
        ...

    def rules(self, tools: Sequence[CallableTool], token_id: TokenIdOf, *, one_only: bool) -> CallRules:
        """Returns rules for an answer that consists of one or more calls.

        Args:
            tools: callable tools.
            token_id: token id of a mark.
            one_only: whether only one call is allowed.
        """
        ...


def lark_text(text: str) -> str:
    """Returns a text in Lark's notation; an empty text, for which Lark has no notation, stays empty."""
    return json.dumps(text) if text else ""


def lark_sequence(text: str, marks: frozenset[str], token_id: TokenIdOf) -> str:
    """Returns a text in Lark's notation, with marks that are special tokens as tokens."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text) if marks else [text]
    return " ".join(lark_mark(piece, token_id) for piece in pieces if piece)


def lark_mark(text: str, token_id: TokenIdOf) -> str:
    """Returns a mark in Lark's notation, as a special token or a text."""
    found = token_id(text)
    return lark_text(text) if found is None else f"<[{found}]>"


def lark_pattern(text: str) -> str:
    """Returns a text escaped for a regular expression of Lark's notation."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


_MEMBER_KEYWORDS = ("properties", "patternProperties", "additionalProperties", "$ref", "allOf", "anyOf", "oneOf")


def _arguments_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments: an object, empty if no members are described."""
    has_members = any(keyword in parameters for keyword in _MEMBER_KEYWORDS)
    return {"type": "object", **({} if has_members else {"properties": {}}), **parameters}
