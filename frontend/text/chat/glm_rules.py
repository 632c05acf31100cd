"""Rules that hold an answer to GLM's form of calls."""

from collections.abc import Iterator
from typing import Any

from frontend.text.chat.argument_kinds import TEXT, kinds_of, names_in, properties_of, resolved
from frontend.text.chat.call_family import CallableTool, TokenIdOf, lark_mark, lark_pattern, lark_text

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"

_DEFINITIONS = ("$defs", "definitions")


class GlmRules:
    """Collects the rules for the arguments of calls."""

    def __init__(self, token_id: TokenIdOf) -> None:
        self._token_id = token_id
        self.lines: list[str] = []
        self.schemas: dict[str, dict[str, Any]] = {}
        self.places: dict[str, int] = {}

    def call(self, index: int, tool: CallableTool) -> str:
        """Returns the rule for a call of a tool."""
        required = names_in(resolved(tool.parameters, tool.parameters).get("required"))
        arguments = []
        for number, (key, schema) in enumerate(properties_of(tool.parameters).items()):
            rule = f"argument_{index}_{number}"
            self.lines.append(f"{rule}: {self._argument(rule, index, key, tool.parameters, schema)}")
            arguments.append(rule if key in required else f"{rule}?")
        start = f"{self._mark(OPENING)} {lark_text(tool.name + chr(10))}"
        return " ".join([start, *arguments, self._mark(CLOSING)])

    def _argument(self, rule: str, index: int, key: str, parameters: dict[str, Any], schema: Any) -> str:
        line_break = lark_text("\n")
        start = f"{self._mark(KEY)} {lark_text(key)} {self._mark(KEY_END)} {line_break} {self._mark(VALUE)}"
        return f"{start} {' '.join(self._value(rule, index, parameters, schema))} {line_break}"

    def _value(self, rule: str, index: int, parameters: dict[str, Any], schema: Any) -> Iterator[str]:
        if kinds_of(parameters, schema) != TEXT:
            definitions: dict[str, Any] = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
            self.schemas[rule] = {**definitions, **schema} if isinstance(schema, dict) else {}
            self.places[rule] = index
            yield f"@{rule}"
            yield self._mark(VALUE_END)
            return
        text = resolved(parameters, schema)
        values = text["enum"] if isinstance(text.get("enum"), list) else [text["const"]] if "const" in text else None
        if values is not None:
            yield f"({' | '.join(lark_text(value) for value in values)})"
            yield self._mark(VALUE_END)
            return
        least, most = text.get("minLength", 0), text.get("maxLength", "")
        some = f"(?s:.{{{least},{most}}})" if isinstance(least, int) and isinstance(most, int | str) else "(?s:.*)"
        if self._token_id(VALUE_END) is None:
            self.lines.append(f"text_{rule}[lazy]: /{some}{lark_pattern(VALUE_END)}/")
            yield f"text_{rule}"
        else:
            self.lines.append(f"TEXT_{rule.upper()}: /{some}/")
            yield f"TEXT_{rule.upper()}"
            yield self._mark(VALUE_END)

    def _mark(self, text: str) -> str:
        return lark_mark(text, self._token_id)
