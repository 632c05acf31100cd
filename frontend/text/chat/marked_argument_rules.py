"""Rules that hold an answer to calls with marks around each argument."""

import json
import re
from collections.abc import Iterator
from typing import Any

from frontend.errors import InvalidRequest
from frontend.limits import MAX_CONSTRAINT_BYTES
from frontend.text.chat.argument_kinds import TEXT, alternatives_of, kinds_of, names_in, properties_of, resolved
from frontend.text.chat.argument_marks import ArgumentMarks
from frontend.text.chat.call_family import CallableTool, TokenIdOf, lark_pattern, lark_sequence, lark_text

_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/]+)")
_PARAMETERS = "parameters"
_OF_ALL_ARGUMENTS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "dependencies", "dependentRequired", "dependentSchemas"),
    *("minProperties", "maxProperties"),
)
"""Keywords that restrict the arguments together, while each has a rule of its own."""
_MOST_CHECKED_CHARS = 300
"""Above this minimum length, llguidance takes too long to exclude marks from a text."""


class MarkedArgumentRules:
    """Collects the rules for the arguments of calls."""

    def __init__(self, marks: ArgumentMarks, token_id: TokenIdOf) -> None:
        self._marks = marks
        self._token_id = token_id
        self._num_bytes = 0
        self.lines: list[str] = []
        self.schemas: dict[str, dict[str, Any]] = {}
        self.places: dict[str, int] = {}

    def call(self, index: int, tool: CallableTool) -> str:
        """Returns the rule for a call of a tool.

        Raises:
            InvalidRequest: its parameters restrict arguments together, are too large with what each refers to, or have
                names that the parser misreads.
        """
        schema = resolved(tool.parameters, tool.parameters)
        if refused := [keyword for keyword in _OF_ALL_ARGUMENTS if schema.get(keyword)]:
            raise InvalidRequest(
                f"a call of {tool.name!r} cannot be enforced in this model's format: its parameters have "
                f"{', '.join(refused)} beside or instead of properties",
                field="spec.chat.tools_json",
            )
        required = frozenset(names_in(schema.get("required")))
        arguments = []
        for number, (key, argument) in enumerate(properties_of(tool.parameters).items()):
            if not self._marks.can_mark(key):
                raise InvalidRequest(
                    f"a call of {tool.name!r} cannot be enforced in this model's format: the argument {key[:64]!r} has "
                    "a name that cannot be marked",
                    field="spec.chat.tools_json",
                )
            rule = f"argument_{index}_{number}"
            self._add(f"{rule}: {self._argument(rule, index, key, tool.parameters, argument)}")
            arguments.append(rule if key in required else f"{rule}?")
        start = self._written(self._marks.written_start, "{name}", tool.name)
        return " ".join([start, *arguments, self._marked(self._marks.written_end)])

    def _argument(self, rule: str, index: int, key: str, parameters: dict[str, Any], schema: Any) -> str:
        start = self._written(self._marks.written_key, "{key}", key)
        return f"{start} {' '.join(self._value(rule, index, parameters, schema))} {lark_text(chr(10))}"

    def _value(self, rule: str, index: int, parameters: dict[str, Any], schema: Any) -> Iterator[str]:
        alone = _standalone(schema, parameters) if isinstance(schema, dict) else {}
        self._count(json.dumps(alone))
        if kinds_of(parameters, schema) != TEXT:
            self.schemas[rule] = alone
            self.places[rule] = index
            yield f"@{rule}"
            yield self._marked(self._marks.line_break + self._marks.value_end)
            return
        values = _texts(parameters, schema)
        if values is not None:
            yield f"({' | '.join(map(lark_text, values))})"
            yield self._marked(self._marks.line_break + self._marks.value_end)
            return
        text = resolved(parameters, schema)
        least, most = text.get("minLength", 0), text.get("maxLength", "")
        if not (isinstance(least, int) and isinstance(most, int | str)):
            least, most = 0, ""
        yield from self._text(rule, least, most)

    def _text(self, rule: str, least: int, most: int | str) -> Iterator[str]:
        """Yields the rules for a plain string and its closing mark; the string contains nothing that ends a value."""
        some, line_break = f"(?s:.{{{least},{most}}})", lark_pattern(self._marks.line_break)
        value_end = lark_pattern(self._marks.value_end)
        if self._token_id(self._marks.value_end) is not None:
            self._add(f"TEXT_{rule.upper()}: /{some}{line_break}/")
            yield f"TEXT_{rule.upper()}"
            yield self._marked(self._marks.value_end)
        elif most == "" and least <= _MOST_CHECKED_CHARS:
            ends = "|".join(map(lark_pattern, sorted(self._marks.value_ends)))
            closing = lark_text(self._marks.line_break + self._marks.value_end)
            self._add(f"TEXT_{rule.upper()}: (/{some}/ & ~/(?s:.*({ends}).*)/) {closing}")
            yield f"TEXT_{rule.upper()}"
        else:  # llguidance cannot combine a maximum length with marks that may be anywhere
            early = f" & ~/(?s:.{{0,{least - 1 + len(self._marks.line_break)}}}{value_end}.*)/"
            check = early if 0 < least <= _MOST_CHECKED_CHARS else ""
            optional = f"({line_break})?" if line_break else ""
            self._add(f"text_{rule}[lazy]: /{some}{optional}{value_end}/{check}")
            yield f"text_{rule}"

    def _add(self, line: str) -> None:
        self._count(line)
        self.lines.append(line)

    def _count(self, text: str) -> None:
        """Counts what one argument adds, before the next one: each may refer to all of the parameters."""
        self._num_bytes += len(text)
        if self._num_bytes > MAX_CONSTRAINT_BYTES:
            raise InvalidRequest(
                f"a call of these tools cannot be enforced: the rules for their arguments have more than "
                f"{MAX_CONSTRAINT_BYTES} bytes, with all that each argument refers to",
                field="spec.chat.tools_json",
            )

    def _written(self, form: str, place: str, text: str) -> str:
        before, _, after = form.partition(place)
        return f"{self._marked(before)} {lark_text(text)} {self._marked(after)}"

    def _marked(self, text: str) -> str:
        return lark_sequence(text, self._marks.texts, self._token_id)


def _texts(parameters: dict[str, Any], schema: Any) -> list[str] | None:
    """Returns the texts that a string may be; None: any."""
    texts: dict[str, None] = {}
    for part in alternatives_of(parameters, schema):
        values = part.get("enum", [part.get("const")])
        if not isinstance(values, list) or values == [None]:
            return None
        texts |= dict.fromkeys(value for value in values if isinstance(value, str))
    return list(texts)


def _standalone(schema: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an argument as a schema of its own, with all that it refers to in the tool's parameters."""
    reached: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [schema]
    while waiting:
        for reference in _references(waiting.pop()):
            found = _DEFINITION.match(reference)
            definitions = schema.get(found[1], parameters.get(found[1])) if found else None
            if found is None or not isinstance(definitions, dict) or found[2] not in definitions:
                return {**_moved(schema), "$defs": {_PARAMETERS: _moved(parameters)}}
            keyword, name = found.groups()
            if name not in reached.setdefault(keyword, {}):
                reached[keyword][name] = definitions[name]
                waiting.append(definitions[name])
    return {**reached, **schema}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from _references(part)


def _moved(schema: Any) -> Any:
    """Returns a part of a tool's parameters for a schema that has these as a definition."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(part) for key, part in schema.items()}
    if isinstance(reference := moved.get("$ref"), str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#/$defs/{_PARAMETERS}{reference[1:]}"
    return moved
