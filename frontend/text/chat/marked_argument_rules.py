"""Rules that hold an answer to calls with marks around each argument."""

from collections.abc import Iterator
from typing import Any

from frontend.text.chat.argument_kinds import TEXT, kinds_of, names_in, properties_of, resolved
from frontend.text.chat.argument_marks import ArgumentMarks
from frontend.text.chat.call_family import CallableTool, TokenIdOf, lark_pattern, lark_sequence, lark_text

_DEFINITIONS = ("$defs", "definitions")


class MarkedArgumentRules:
    """Collects the rules for the arguments of calls."""

    def __init__(self, marks: ArgumentMarks, token_id: TokenIdOf) -> None:
        self._marks = marks
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
        start = self._written(self._marks.written_start, "{name}", tool.name)
        return " ".join([start, *arguments, self._marked(self._marks.written_end)])

    def _argument(self, rule: str, index: int, key: str, parameters: dict[str, Any], schema: Any) -> str:
        start = self._written(self._marks.written_key, "{key}", key)
        return f"{start} {' '.join(self._value(rule, index, parameters, schema))} {lark_text(chr(10))}"

    def _value(self, rule: str, index: int, parameters: dict[str, Any], schema: Any) -> Iterator[str]:
        if kinds_of(parameters, schema) != TEXT:
            definitions: dict[str, Any] = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
            self.schemas[rule] = {**definitions, **schema} if isinstance(schema, dict) else {}
            self.places[rule] = index
            yield f"@{rule}"
            yield self._marked(self._marks.value_end)
            return
        text = resolved(parameters, schema)
        values = text["enum"] if isinstance(text.get("enum"), list) else [text["const"]] if "const" in text else None
        if values is not None:
            yield f"({' | '.join(lark_text(value) for value in values)})"
            yield self._marked(self._marks.value_end)
            return
        least, most = text.get("minLength", 0), text.get("maxLength", "")
        some = f"(?s:.{{{least},{most}}})" if isinstance(least, int) and isinstance(most, int | str) else "(?s:.*)"
        if self._token_id(self._marks.value_end) is None:
            self.lines.append(f"text_{rule}[lazy]: /{some}{lark_pattern(self._marks.value_end)}/")
            yield f"text_{rule}"
        else:
            self.lines.append(f"TEXT_{rule.upper()}: /{some}/")
            yield f"TEXT_{rule.upper()}"
            yield self._marked(self._marks.value_end)

    def _written(self, form: str, place: str, text: str) -> str:
        before, _, after = form.partition(place)
        return f"{self._marked(before)} {lark_text(text)} {self._marked(after)}"

    def _marked(self, text: str) -> str:
        return lark_sequence(text, self._marks.texts, self._token_id)
