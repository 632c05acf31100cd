"""Tool calls with marks around each argument, anywhere in an answer. GLM's, and those of Qwen3-Coder:

    <tool_call>name                         <tool_call>
    <arg_key>city</arg_key>                 <function=name>
    <arg_value>Rome</arg_value>             <parameter=city>
    </tool_call>                            Rome
                                            </parameter>
                                            </function>
                                            </tool_call>

Line breaks are optional; Qwen's `<tool_call>`, one of its closing marks, and `</parameter>` too. The tool's schema
decides whether a value is a plain string or JSON.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frontend.text.chat.argument_kinds import TEXT, as_json, kinds_of_argument, properties_of
from frontend.text.chat.argument_marks import MOST_IN_KEY, ArgumentMarks
from frontend.text.chat.call_family import CallableTool, CallRules, JsonSchema, TemplateSigns, TokenIdOf, lark_text
from frontend.text.chat.call_ids import long_call_id
from frontend.text.chat.call_output import CallOutput
from frontend.text.chat.call_parser import CallParser
from frontend.text.chat.deltas import Delta
from frontend.text.chat.marked_argument_rules import MarkedArgumentRules
from frontend.text.chat.marks import mark_finder

_MOST_IN_NAME = 200
_MOST_IN_NEXT_KEY = 100
"""After an unclosed value: all that is held back there may be part of the value."""


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
    CLOSED = "closed"  # the last closing mark may follow


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
        self._starts = mark_finder(marks.openings)
        self._header_ends = mark_finder(frozenset({marks.key, *marks.closings}))
        self._value_ends = mark_finder(marks.value_ends)
        closed = dict.fromkeys(marks.closings, _Place.CLOSED) | {marks.closings[-1]: _Place.CONTENT}
        self._after_value = {marks.key: _Place.KEY, **closed}
        self._place = _Place.CONTENT
        self._opening = ""
        self.name: str | None = None
        self._arguments = ""  # not taken yet
        self._declared: frozenset[str] = frozenset()  # the tool's arguments
        self._given: set[str] = set()
        self._key = ""
        self._at_start = False  # of the value
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
        if self._place is _Place.VALUE:
            marks = self._marks
            if marks.line_break and self._text.strip() == marks.closings[0]:  # held back as the end of the call
                self._end_value(_Place.CONTENT)
                self._text = ""
            elif self._kinds == TEXT:
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
                return self._expect(self._after_value)
            case _Place.CLOSED:
                return self._expect({self._marks.closings[-1]: _Place.CONTENT})

    def _find_call(self) -> bool:
        opening = self._find_opening(self._starts)
        if opening is None:
            return False
        self._opening, self.name = opening, None
        self._place = _Place.NAME
        return True

    def _read_name(self) -> bool:
        found = self._header_ends.find(self._text)
        written = found.before if found.mark else self._text
        if found.mark is None and len(written) < _MOST_IN_NAME:
            return False
        header = self._opening + written
        name = self._marks.header.fullmatch(header) if found.mark and len(written) < _MOST_IN_NAME else None
        if name is None:
            self._output.reject()
            self._place = _Place.CONTENT
            return True
        assert found.mark is not None
        self.name, self._text = name["name"], found.rest
        self._declared, self._given = frozenset(properties_of(self._tools.get(self.name, {}))), set()
        self._write("{")
        self._enter(self._after_value[found.mark])
        return True

    def _read_key(self) -> bool:
        written, end, rest = self._text.partition(self._marks.key_end)
        if not end and len(written) < MOST_IN_KEY:
            return False
        if not end or len(written) >= MOST_IN_KEY or any(char in written for char in self._marks.not_in_key):
            self._enter(_Place.CONTENT)
            return True
        self._key, self._text = written.strip(), rest
        self._enter(_Place.BEFORE_VALUE if self._marks.value else _Place.VALUE)
        return True

    def _read_value(self) -> bool:
        if self._at_start:
            self._text = self._text.removeprefix(self._marks.line_break)
            self._at_start = False
        found = self._value_ends.find(self._text)
        self._take_value(found.before)
        self._text = found.rest
        if found.mark is None:
            return False
        if self._marks.line_break and found.mark == self._marks.next_key:
            return self._read_next_key()
        self._end_value(_Place.AFTER_VALUE if found.mark.endswith(self._marks.value_end) else _Place.CONTENT)
        return True

    def _read_next_key(self) -> bool:
        """Ends an unclosed value if another argument of the tool follows; otherwise the mark belongs to the value."""
        key, end, _ = self._text[:_MOST_IN_NEXT_KEY].partition(self._marks.key_end)
        if not end and len(self._text) < _MOST_IN_NEXT_KEY:
            self._text = self._marks.next_key + self._text
            return False
        if end and key in self._declared and key not in self._given:
            self._end_value(_Place.KEY)
        else:
            self._take_value(self._marks.next_key)
        return True

    def _take_value(self, text: str) -> None:
        if self._kinds == TEXT:
            self._write(_escaped(text))
        else:
            self._value.append(text)

    def _end_value(self, place: _Place) -> None:
        self._write('"' if self._kinds == TEXT else as_json("".join(self._value), self._kinds))
        self._enter(place)

    def _expect(self, places: Mapping[str, _Place]) -> bool:
        """Skips whitespace and takes one of the marks; anything else ends the call."""
        text = self._text = self._text.lstrip()
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
                self._at_start = True
                comma = ", " if self._given else ""
                self._given.add(self._key)
                self._write(f"{comma}{json.dumps(self._key, ensure_ascii=False)}: " + '"' * (self._kinds == TEXT))
            case _Place.CONTENT | _Place.CLOSED if self._place is not _Place.CLOSED:
                self._write("}")
        self._place = place

    def _write(self, arguments: str) -> None:
        self._arguments += arguments
        self._output.read(self, "")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
