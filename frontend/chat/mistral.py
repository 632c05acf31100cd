"""Calls as Mistral's models write them, anywhere in the answer:

[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]                 up to 2024
[TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}               since, with or without [CALL_ID]id or [ARGS]
"""

import enum
import re

from frontend.chat.call_output import CallOutput
from frontend.chat.call_parser import CallParser
from frontend.chat.call_reader import ArgumentsReader, CallReader, ReaderStatus
from frontend.chat.marks import mark_finder

_OPENING = "[TOOL_CALLS]"
_MOST_BEFORE_CALL = 200
_BEFORE_CALL = re.compile(rf"[\w.\-\[\]\s]{{0,{_MOST_BEFORE_CALL}}}")
_NAME = re.compile(r"\s*([\w.\-]{1,64})(?:\[CALL_ID\][\w\-]{1,64})?(?:\[ARGS\])?\s*")

MARKS = frozenset({_OPENING, "[CALL_ID]", "[ARGS]"})
"""Special tokens of these models that belong to calls."""


class _Place(enum.Enum):
    CONTENT = "content"
    OPENED = "opened"  # after the mark: a list, or a name
    CALL = "call"
    AFTER_CALL = "after call"  # of a list: a comma, or its end


class MistralCalls(CallParser):
    """One answer's content and calls; an `AnswerParser`."""

    def __init__(self, output: CallOutput) -> None:
        super().__init__(output)
        self._finder = mark_finder(frozenset({_OPENING}))
        self._reader: CallReader | ArgumentsReader = CallReader()
        self._in_list = False
        self._place = _Place.CONTENT

    def _holds_content(self) -> bool:
        return self._place is not _Place.AFTER_CALL

    def _advance(self) -> bool:
        match self._place:
            case _Place.CONTENT:
                return self._find_call()
            case _Place.OPENED:
                return self._begin_call()
            case _Place.CALL:
                return self._read_call()
            case _Place.AFTER_CALL:
                return self._go_on()

    def _find_call(self) -> bool:
        found = self._finder.find(self._text)
        self._output.content(found.before)
        self._text = found.rest
        if found.mark is None:
            return False
        self._output.open(found.mark)
        self._place = _Place.OPENED
        return True

    def _begin_call(self) -> bool:
        text = self._text.lstrip()
        num_spaces = len(self._text) - len(text)
        if text.startswith("[") and num_spaces < _MOST_BEFORE_CALL:
            self._in_list = True
            self._output.open(_OPENING + self._text[: num_spaces + 1])
            self._reader, self._text = CallReader(), text[1:]
            self._place = _Place.CALL
            return True
        before = _BEFORE_CALL.match(self._text)
        end = before.end() if before else 0
        if end == len(self._text):
            return False
        name = _NAME.fullmatch(self._text, 0, end) if end < _MOST_BEFORE_CALL else None
        if name is None or self._text[end] != "{":
            self._output.give_up()
            self._place = _Place.CONTENT
            return True
        self._in_list = False
        self._reader, self._text = ArgumentsReader(name[1]), self._text[end:]
        self._place = _Place.CALL
        return True

    def _read_call(self) -> bool:
        rest = self._reader.read(self._text)
        self._output.read(self._reader, self._text[: len(self._text) - len(rest)])
        self._text = rest
        if self._reader.status is ReaderStatus.COMPLETE:
            self._place = _Place.AFTER_CALL if self._in_list else _Place.CONTENT
        elif self._reader.status is ReaderStatus.FAILED:
            self._output.give_up()
            self._place = _Place.CONTENT
        return bool(rest)

    def _go_on(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if self._text[0] == ",":
            self._output.open(",")
            self._reader = CallReader()
            self._place = _Place.CALL
        else:
            self._place = _Place.CONTENT
        self._text = self._text[1:] if self._text[0] in ",]" else self._text
        return True
