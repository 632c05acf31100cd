"""Tool calls between marks, anywhere in an answer: one parser and one set of rules for all families that use marks.

`MarkedCallFamily` describes the marks of a family. A call is written in one of three ways:

    an object                              <mark>{"name": ..., "arguments": {...}}<mark>
    an object in a list                    <mark>[{...}, {...}]
    a name, more marks, and the arguments  <mark>name<mark>{...}<mark>
"""

import enum
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from frontend.text.chat.call_family import (
    TOOL_NAME,
    CallableTool,
    CallRules,
    JsonSchema,
    TemplateSigns,
    TokenIdOf,
    lark_sequence,
)
from frontend.text.chat.call_ids import long_call_id
from frontend.text.chat.call_output import CallOutput
from frontend.text.chat.call_parser import CallParser
from frontend.text.chat.call_reader import ArgumentsReader, CallReader, ReaderStatus
from frontend.text.chat.marks import mark_finder

_MOST_BEFORE_CALL = 200

NAME = rf"(?P<name>{TOOL_NAME})"
"""The name of a tool, in the `header` of a form."""


@dataclass(frozen=True, slots=True)
class MarkedCallFamily:
    """The marks of one family; a `CallFamily`.

    Attributes:
        seen: signs of the family in a chat template.
        openings: marks that may start a call.
        lists: whether a list of objects may follow an opening.
        header: regular expression for the text between an opening and the arguments, with the group `name` and
            optionally `id`; empty if objects follow.
        closings: texts that may follow a call, in this order; models omit some.
        others: marks within `header`.
        written: template of a call for the grammar, with `{name}`, the call's `{number}` and `{arguments}`, or with the
            `{object}` of name and arguments.
        before, between, after: texts before all calls, between two calls and after all calls, for the grammar.
        new_call_id: makes ids for calls whose header has none.
    """

    seen: TemplateSigns
    openings: frozenset[str]
    written: str
    lists: bool = False
    header: str = ""
    closings: tuple[str, ...] = ()
    others: frozenset[str] = frozenset()
    before: str = ""
    between: str = ""
    after: str = ""
    new_call_id: Callable[[], str] = long_call_id

    @property
    def marks(self) -> frozenset[str]:
        """See `CallFamily`."""
        return self.openings | self.others | {closing for closing in self.closings if closing.strip("`")}

    def parser(self, tools: Mapping[str, JsonSchema], prompt: str) -> "MarkedCalls":  # noqa: ARG002
        """See `CallFamily`. After a mark, a call may have any name."""
        return MarkedCalls(CallOutput(self.new_call_id), self)

    def rules(self, tools: Sequence[CallableTool], token_id: TokenIdOf, *, one_only: bool) -> CallRules:
        """See `CallFamily`."""

        def sequence(text: str) -> str:
            pieces = [lark_sequence(piece, self.marks, token_id) for piece in text.split("{number}")]
            return " NUMBER ".join(pieces).strip()

        calls = []
        for index, tool in enumerate(tools):
            written = self.written.replace(
                "{object}", f'{{"name": {json.dumps(tool.name)}, "arguments": {{arguments}}}}'
            )
            start, _, end = written.replace("{name}", tool.name).partition("{arguments}")
            calls.append(f"{sequence(start)} @arguments_{index} {sequence(end)}".strip())
        more = "" if one_only else f"({sequence(self.between)} call)*"
        around = [sequence(self.before), "call", more, sequence(self.after)]
        lark = f"calls: {' '.join(filter(None, around))}\ncall: {' | '.join(calls)}"
        if "{number}" in self.written:
            lark += "\nNUMBER: /[0-9]{1,3}/"
        return CallRules.with_json_arguments(lark, tools)


class _Place(enum.Enum):
    CONTENT = "content"
    OPENED = "opened"  # after an opening
    CALL = "call"
    IN_LIST = "in list"  # after a call of a list, before a comma or the end of the list
    CLOSING = "closing"  # after a call, before its closings


class MarkedCalls(CallParser):
    """Parses one answer into content and calls; an `AnswerParser`.

    Args:
        form: of the calls.
    """

    def __init__(self, output: CallOutput, form: MarkedCallFamily) -> None:
        super().__init__(output)
        self._form = form
        self._header = re.compile(form.header) if form.header else None
        self._finder = mark_finder(form.openings)
        self._opening = ""
        self._reader: CallReader | ArgumentsReader = CallReader()
        self._in_list = False
        self._closings: list[str] = []  # that may still follow
        self._place = _Place.CONTENT

    def _holds_content(self) -> bool:
        return self._place not in (_Place.IN_LIST, _Place.CLOSING)

    def _advance(self) -> bool:
        match self._place:
            case _Place.CONTENT:
                return self._find_call()
            case _Place.OPENED:
                return self._begin_call()
            case _Place.CALL:
                return self._read_call()
            case _Place.IN_LIST:
                return self._go_on()
            case _Place.CLOSING:
                return self._close_call()

    def _find_call(self) -> bool:
        opening = self._find_opening(self._finder)
        if opening is None:
            return False
        self._opening, self._in_list = opening, False
        self._place = _Place.OPENED
        return True

    def _begin_call(self) -> bool:
        if self._header is None and not self._form.lists:
            self._read_with(CallReader())
            return True
        text = self._text.lstrip()
        num_spaces = len(self._text) - len(text)
        if num_spaces >= _MOST_BEFORE_CALL:
            return self._give_up()
        if not text:
            return False
        if self._form.lists and text[0] == "[":
            self._in_list = True
            self._output.open(self._opening + self._text[: num_spaces + 1])
            self._text = text[1:]
            self._read_with(CallReader())
            return True
        if self._header is None:
            return self._give_up()
        end = self._text.find("{")
        if end < 0 and len(self._text) < _MOST_BEFORE_CALL:
            return False
        header = self._header.fullmatch(self._text, 0, end) if 0 <= end < _MOST_BEFORE_CALL else None
        if header is None:
            return self._give_up()
        self._output.open(self._opening + self._text[:end])
        self._text = self._text[end:]
        self._read_with(ArgumentsReader(header["name"], header.groupdict().get("id")))
        return True

    def _read_with(self, reader: CallReader | ArgumentsReader) -> None:
        self._reader = reader
        self._place = _Place.CALL

    def _give_up(self) -> bool:
        self._output.reject()
        self._place = _Place.CONTENT
        return True

    def _read_call(self) -> bool:
        status = self._read_json(self._reader)
        if status is ReaderStatus.COMPLETE:
            self._closings = list(self._form.closings)
            self._place = _Place.IN_LIST if self._in_list else _Place.CLOSING
        elif status is ReaderStatus.FAILED:
            self._give_up()
        return bool(self._text)

    def _go_on(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if self._text[0] == ",":
            self._output.open(",")
            self._read_with(CallReader())
        else:
            self._place = _Place.CLOSING
        self._text = self._text[1:] if self._text[0] in ",]" else self._text
        return True

    def _close_call(self) -> bool:
        while self._closings:
            text, closing = self._text.lstrip(), self._closings[0]
            if len(text) < len(closing) and closing.startswith(text):
                return False
            self._text = text.removeprefix(closing)
            del self._closings[0]
        self._place = _Place.CONTENT
        return True
