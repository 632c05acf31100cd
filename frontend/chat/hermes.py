"""Calls as Hermes and Qwen write them, anywhere in an answer.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with space around the object.
"""

import enum

from frontend.chat.call_output import CallOutput
from frontend.chat.call_parser import CallParser
from frontend.chat.call_reader import CallReader, ReaderStatus
from frontend.chat.marks import mark_finder

_OPENING = "<tool_call>"
_CLOSING = "</tool_call>"


class _Place(enum.Enum):
    CONTENT = "content"
    CALL = "call"
    CLOSING = "closing"  # between a call and its closing mark, which a model may forget


class HermesCalls(CallParser):
    """One answer's content and calls; an `AnswerParser`."""

    def __init__(self, output: CallOutput) -> None:
        super().__init__(output)
        self._finder = mark_finder(frozenset({_OPENING}))
        self._reader = CallReader()
        self._place = _Place.CONTENT

    def _holds_content(self) -> bool:
        return self._place is _Place.CONTENT

    def _advance(self) -> bool:
        match self._place:
            case _Place.CONTENT:
                return self._find_call()
            case _Place.CALL:
                return self._read_call()
            case _Place.CLOSING:
                return self._close_call()

    def _find_call(self) -> bool:
        found = self._finder.find(self._text)
        self._output.content(found.before)
        self._text = found.rest
        if found.mark is None:
            return False
        self._output.open(found.mark)
        self._reader = CallReader()
        self._place = _Place.CALL
        return True

    def _read_call(self) -> bool:
        rest = self._reader.read(self._text)
        self._output.read(self._reader, self._text[: len(self._text) - len(rest)])
        self._text = rest
        if self._reader.status is ReaderStatus.COMPLETE:
            self._place = _Place.CLOSING
        elif self._reader.status is ReaderStatus.FAILED:
            self._output.give_up()
            self._place = _Place.CONTENT
        return bool(rest)

    def _close_call(self) -> bool:
        text = self._text.lstrip()
        if len(text) < len(_CLOSING) and _CLOSING.startswith(text):
            return False
        self._text = text.removeprefix(_CLOSING)
        self._place = _Place.CONTENT
        return True
