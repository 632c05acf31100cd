"""Tool calls with marks around each argument, anywhere in an answer. For example GLM's:

    <tool_call>name
    <arg_key>city</arg_key>
    <arg_value>Rome</arg_value>
    </tool_call>

Line breaks are optional. The tool's schema decides whether a value is a plain string or JSON.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frontend.text.chat.argument_kinds import TEXT, as_json, kinds_of_argument
from frontend.text.chat.argument_marks import ArgumentMarks
from frontend.text.chat.call_family import CallableTool, CallRules, JsonSchema, TemplateSigns, TokenIdOf, lark_text
from frontend.text.chat.call_ids import long_call_id
from frontend.text.chat.call_output import CallOutput
from frontend.text.chat.call_parser import CallParser
from frontend.text.chat.deltas import Delta
from frontend.text.chat.marked_argument_rules import MarkedArgumentRules
from frontend.text.chat.marks import mark_finder

_MOST_IN_NAME = 200


@dataclass(frozen=True, slots=True)
class MarkedArgumentsFamily:
    """A format with marks around each argument; a `CallFamily`."""

    seen: TemplateSigns
    argument_marks: ArgumentMarks

    @property
    def marks(self) -> frozenset[str]:
        """See `CallFamily`."""
        return self.argument_marks.texts

    def parser(self, tools: Mapping[str, JsonSchema], prompt: str) -> "MarkedArgumentCalls":  # noqa: ARG002
        """See `CallFamily`."""
        return MarkedArgumentCalls(CallOutput(long_call_id), self.argument_marks, tools)

    def rules(self, tools: Sequence[CallableTool], token_id: TokenIdOf, *, one_only: bool) -> CallRules:
        """See `CallFamily`. Only the schema's arguments are allowed, in its order. `enum`, `minLength` and `maxLength`
        restrict strings.
        """
        rules = MarkedArgumentRules(self.argument_marks, token_id)
        calls = " | ".join(rules.call(index, tool) for index, tool in enumerate(tools))
        more = "" if one_only else f" ({lark_text(chr(10))} call)*"
        return CallRules("\n".join([f"calls: call{more}", f"call: {calls}", *rules.lines]), rules.schemas, rules.places)


class _Place(enum.Enum):
    CONTENT = "content"
    NAME = "name"
    KEY = "key"
    BEFORE_VALUE = "before value"
    VALUE = "value"
    AFTER_VALUE = "after value"


class MarkedArgumentCalls(CallParser):
    """Parses one answer into content and calls; an `AnswerParser`, and the `Reader` of the current call.

    Args:
        marks: the format.
        tools: offered tools: names, and schemas of the arguments.

    Attributes:
        name: the called tool, once the call is certain.
        call_id: always None, because the model writes no ids.
    """

    call_id: str | None = None

    def __init__(self, output: CallOutput, marks: ArgumentMarks, tools: Mapping[str, JsonSchema]) -> None:
        super().__init__(output)
        self._marks = marks
        self._tools = tools
        self._place = _Place.CONTENT
        self.name: str | None = None
        self._arguments = ""  # not taken yet
        self._num_arguments = 0
        self._key = ""
        self._value: list[str] = []  # pieces of a value that may be JSON
        self._kinds: frozenset[str] | None = None

    def take_arguments(self) -> str:
        """Returns the arguments read since the last call."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _holds_content(self) -> bool:
        return self._place in (_Place.CONTENT, _Place.NAME)

    def finish(self) -> list[Delta]:
        """Ends the answer; returns what was held back."""
        if self._place is _Place.VALUE and self._kinds == TEXT:
            self._write(_escaped(self._text))
        return super().finish()

    def _advance(self) -> bool:
        match self._place:
            case _Place.CONTENT:
                return self._find_call()
            case _Place.NAME:
                return self._read_name()
            case _Place.KEY:
                return self._read_key()
            case _Place.BEFORE_VALUE:
                return self._expect({self._marks.value: _Place.VALUE})
            case _Place.VALUE:
                return self._read_value()
            case _Place.AFTER_VALUE:
                return self._expect({self._marks.key: _Place.KEY, self._marks.closing: _Place.CONTENT})

    def _find_call(self) -> bool:
        found = mark_finder(frozenset({self._marks.opening})).find(self._text)
        self._output.content(found.before)
        self._text = found.rest
        if found.mark is None:
            return False
        self._output.open(found.mark)
        self.name = None
        self._place = _Place.NAME
        return True

    def _read_name(self) -> bool:
        found = mark_finder(frozenset({self._marks.key, self._marks.closing})).find(self._text)
        written = found.before if found.mark else self._text
        if found.mark is None and len(written) < _MOST_IN_NAME:
            return False
        header = self._marks.opening + written
        name = self._marks.header.fullmatch(header) if found.mark and len(written) < _MOST_IN_NAME else None
        if name is None:
            self._output.reject()
            self._place = _Place.CONTENT
            return True
        self.name, self._num_arguments = name[1], 0
        self._text = found.rest
        self._write("{")
        self._enter(_Place.KEY if found.mark == self._marks.key else _Place.CONTENT)
        return True

    def _read_key(self) -> bool:
        found = mark_finder(frozenset({self._marks.key_end})).find(self._text)
        if found.mark is None:
            return False
        self._key, self._text = found.before.strip(), found.rest
        self._place = _Place.BEFORE_VALUE
        return True

    def _read_value(self) -> bool:
        found = mark_finder(frozenset({self._marks.value_end})).find(self._text)
        self._text = found.rest
        if self._kinds == TEXT:
            self._write(_escaped(found.before))
        else:
            self._value.append(found.before)
        if found.mark is None:
            return False
        self._write('"' if self._kinds == TEXT else as_json("".join(self._value), self._kinds))
        self._place = _Place.AFTER_VALUE
        return True

    def _expect(self, places: Mapping[str, _Place]) -> bool:
        """Skips whitespace and takes one of the marks; anything else ends the call."""
        text = self._text.lstrip()
        for mark, place in places.items():
            if text.startswith(mark):
                self._text = text[len(mark) :]
                self._enter(place)
                return True
        if any(mark.startswith(text) for mark in places):
            return False
        self._enter(_Place.CONTENT)
        return True

    def _enter(self, place: _Place) -> None:
        match place:
            case _Place.VALUE:
                assert self.name is not None
                self._kinds = kinds_of_argument(self._tools.get(self.name), self._key)
                self._value = []
                comma = ", " if self._num_arguments else ""
                self._num_arguments += 1
                self._write(f"{comma}{json.dumps(self._key, ensure_ascii=False)}: " + '"' * (self._kinds == TEXT))
            case _Place.CONTENT:
                self._write("}")
        self._place = place

    def _write(self, arguments: str) -> None:
        self._arguments += arguments
        self._output.read(self, "")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
