"""Llama 3's tool calls: the answer is `{"name": ..., "parameters": {...}}`, or several such objects separated by `;`.

No mark says that such an object is a call. It is one only if it names an offered tool, has arguments, and has no other
members than a call. After `<|python_tag|>`, which precedes only calls, any name is enough.
"""

import enum
import json
from collections.abc import Collection, Mapping, Sequence

from frontend.text.chat.call_family import (
    CallableTool,
    CallRules,
    JsonSchema,
    TemplateSigns,
    TokenIdOf,
    lark_text,
)
from frontend.text.chat.call_ids import long_call_id
from frontend.text.chat.call_output import CallOutput
from frontend.text.chat.call_parser import CallParser
from frontend.text.chat.call_reader import CallReader, ReaderStatus

_TAG = "<|python_tag|>"
_SEPARATORS = "; \t\r\n"


class _Place(enum.Enum):
    BEFORE = "before"  # a call may start
    CALL = "call"
    CONTENT = "content"  # no more calls


class Llama3Calls(CallParser):
    """Parses one answer into content and calls; an `AnswerParser`.

    Args:
        tool_names: names of the offered tools.
    """

    def __init__(self, output: CallOutput, tool_names: Collection[str]) -> None:
        super().__init__(output)
        self._tool_names = frozenset(tool_names)
        self._reader = CallReader()
        self._place = _Place.BEFORE
        self._has_called = False

    def _advance(self) -> bool:
        match self._place:
            case _Place.BEFORE:
                return self._find_call()
            case _Place.CALL:
                return self._read_call()
            case _Place.CONTENT:
                self._output.content(self._text)
                self._text = ""
                return False

    def _find_call(self) -> bool:
        if self._has_called:
            self._text = self._text.lstrip(_SEPARATORS)
        text = self._text.lstrip()
        if len(text) < len(_TAG) and _TAG.startswith(text):
            return False
        space = self._text[: len(self._text) - len(text)]
        if text.startswith(_TAG):
            self._begin(space + _TAG, CallReader())
        elif text.startswith("{"):
            self._begin(space, CallReader(only_names=self._tool_names, strict=True))
        else:
            self._place = _Place.CONTENT
        return True

    def _begin(self, mark: str, reader: CallReader) -> None:
        self._output.open(mark)
        self._text = self._text.removeprefix(mark)
        self._reader = reader
        self._place = _Place.CALL

    def _read_call(self) -> bool:
        status = self._read_json(self._reader)
        if status is ReaderStatus.COMPLETE:
            self._has_called = True
            self._place = _Place.BEFORE
        elif status is ReaderStatus.FAILED:
            self._output.reject()
            self._place = _Place.CONTENT
        return bool(self._text)


class Llama3Family:
    """Llama 3's format; a `CallFamily`."""

    seen = TemplateSigns((("<|start_header_id|>", '"parameters"'),))
    marks = frozenset({_TAG})

    def parser(self, tools: Mapping[str, JsonSchema], prompt: str) -> Llama3Calls:  # noqa: ARG002
        """See `CallFamily`."""
        return Llama3Calls(CallOutput(long_call_id), tools)

    def rules(self, tools: Sequence[CallableTool], token_id: TokenIdOf, *, one_only: bool) -> CallRules:  # noqa: ARG002
        """See `CallFamily`."""
        starts = [f'{{"name": {json.dumps(tool.name)}, "parameters": ' for tool in tools]
        calls = [f"{lark_text(start)} @arguments_{i} {lark_text('}')}" for i, start in enumerate(starts)]
        more = "" if one_only else f" ({lark_text('; ')} call)*"
        return CallRules.with_json_arguments(f"calls: call{more}\ncall: {' | '.join(calls)}", tools)
