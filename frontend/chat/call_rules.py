"""Rules, in llguidance's Lark notation, that hold an answer to the marks a model knows: the calls it must make, and the
reasoning that may come before whatever it is held to.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_SAY_MEMBERS = ("properties", "patternProperties", "additionalProperties", "$ref", "allOf", "anyOf", "oneOf")

TokenIdOf = Callable[[str], int | None]
"""The id of a special token; None for a text that is none: it is written like any other."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules for calls.

    Attributes:
        lark: the rules, `calls` the first of them.
        schemas: JSON Schemas of the arguments, by the names that the rules have for them.
    """

    lark: str
    schemas: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called.

    Attributes:
        parameters: JSON Schema of its arguments.
    """

    name: str
    parameters: dict[str, Any]


def call_rules(style: str, tools: Sequence[CallableTool], token_id: TokenIdOf, *, one_only: bool) -> CallRules:
    """The rules for at least one call.

    Args:
        style: "hermes", "llama3", "mistral", or "mistral names" for `[TOOL_CALLS]name[ARGS]{...}`.
        tools: one of which each call names.
        token_id: of a mark.
        one_only: not more than one call.
    """
    names = {f"arguments_{index}": tool.name for index, tool in enumerate(tools)}
    schemas = {rule: _arguments_schema(tool.parameters) for rule, tool in zip(names, tools, strict=True)}

    def objects(arguments: str) -> str:
        beginnings = {rule: f'{{"name": {json.dumps(name)}, "{arguments}": ' for rule, name in names.items()}
        return "call: " + " | ".join(f"{_text(start)} @{rule} {_text('}')}" for rule, start in beginnings.items())

    def mark(text: str) -> str:
        found = token_id(text)
        return _text(text) if found is None else f"<[{found}]>"

    match style:
        case "hermes":
            line = _text("\n")
            marked = f"{mark('<tool_call>')} {line} call {line} {mark('</tool_call>')}"
            more = "" if one_only else f" ({line} marked)*"
            return CallRules(f"calls: marked{more}\nmarked: {marked}\n{objects('arguments')}", schemas)
        case "llama3":
            more = "" if one_only else f" ({_text('; ')} call)*"
            return CallRules(f"calls: call{more}\n{objects('parameters')}", schemas)
        case "mistral":
            more = "" if one_only else f" ({_text(', ')} call)*"
            calls = f"{mark('[TOOL_CALLS]')} {_text('[')} call{more} {_text(']')}"
            return CallRules(f"calls: {calls}\n{objects('arguments')}", schemas)
    arguments = mark("[ARGS]")
    call = "call: " + " | ".join(f"{_text(name)} {arguments} @{rule}" for rule, name in names.items())
    more = "" if one_only else "+"
    return CallRules(f"calls: marked{more}\nmarked: {mark('[TOOL_CALLS]')} call\n{call}", schemas)


def reasoning_rules(opening: str, closing: str, token_id: TokenIdOf, *, opened: bool) -> str:
    """Rules for what comes before an answer, `before` the first of them: reasoning, and the newlines behind it.

    Args:
        opening, closing: the marks.
        token_id: of a mark.
        opened: the prompt has opened the reasoning, so that it must be closed; else it need not be there.
    """
    end_id = token_id(closing)
    newlines = r"NEWLINES: /\n{0,2}/"
    if end_id is None:
        end = _regex(closing)
        if opened:
            return f"before: thought NEWLINES\nthought[lazy]: /(?s:.*){end}/\n{newlines}"
        return f"before: | thought NEWLINES\nthought[lazy]: /{_regex(opening)}(?s:.*){end}/\n{newlines}"
    thought, text = f"THOUGHT? <[{end_id}]> NEWLINES", r"THOUGHT: /(?s:.+)/"
    if opened:
        return f"before: {thought}\n{text}\n{newlines}"
    start_id = token_id(opening)
    start = _text(opening) if start_id is None else f"<[{start_id}]>"
    return f"before: | {start} {thought}\n{text}\n{newlines}"


def _arguments_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, without members if nothing is said of any."""
    says_members = any(keyword in parameters for keyword in _SAY_MEMBERS)
    return {"type": "object", **({} if says_members else {"properties": {}}), **parameters}


def _text(text: str) -> str:
    return json.dumps(text)


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
