"""Collects the deltas of one answer with tool calls: numbers the calls, holds back text that may belong to one."""

from collections.abc import Callable
from typing import Protocol

from frontend.text.chat.deltas import ContentText, Delta, ReasoningText, ToolCallArguments, ToolCallStart


class Reader(Protocol):
    """Reads one call."""

    @property
    def name(self) -> str | None:
        """Name of the tool, once the call is certain."""
        ...

    @property
    def call_id(self) -> str | None:
        """Id that the model gave the call; None without one."""
        ...

    def take_arguments(self) -> str:
        """Returns the arguments read since the previous call."""
        ...


class CallOutput:
    """Collects deltas. Omits whitespace before and after a call, which belongs to its marks.

    Args:
        new_call_id: makes ids for calls without one.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._deltas: list[Delta] = []
        self._num_calls = 0
        self._space = ""  # at the end of the content so far
        self._follows_call = False  # no content since the last call
        self._held = ""  # read as a call that is not certain
        self._is_certain = False

    def content(self, text: str) -> None:
        """Takes text outside calls."""
        text = text.lstrip() if self._follows_call else self._space + text
        content = text.rstrip()
        if content:
            self._deltas.append(ContentText(content))
            self._follows_call = False
        self._space = "" if self._follows_call else text[len(content) :]

    def open(self, mark: str) -> None:
        """Starts a possible call; `mark` is its opening mark, or empty."""
        self._held, self._is_certain = mark, False

    def read(self, reader: Reader, text: str) -> None:
        """Takes `text`, which `reader` has read."""
        if not self._is_certain:
            self._held += text
            if reader.name is None:
                return
            self._deltas.append(ToolCallStart(self._num_calls, reader.call_id or self._new_call_id(), reader.name))
            self._num_calls += 1
            self._is_certain = self._follows_call = True
            self._held = self._space = ""
        arguments = reader.take_arguments()
        if arguments:
            self._deltas.append(ToolCallArguments(self._num_calls - 1, arguments))

    def reject(self) -> None:
        """Turns what was read since `open` into content, unless the call is certain."""
        held, self._held = self._held, ""
        if held:
            self.content(held)

    def take(self) -> list[Delta]:
        """Returns the merged deltas so far."""
        deltas, self._deltas = self._deltas, []
        return merged(deltas)

    def finish(self) -> list[Delta]:
        """Ends the answer."""
        self.reject()
        if self._space:
            self._deltas.append(ContentText(self._space))
            self._space = ""
        return self.take()


def merged(deltas: list[Delta]) -> list[Delta]:
    """Merges adjacent deltas of the same part."""
    result: list[Delta] = []
    for delta in deltas:
        match (result[-1] if result else None), delta:
            case ContentText(before), ContentText(text):
                result[-1] = ContentText(before + text)
            case ReasoningText(before), ReasoningText(text):
                result[-1] = ReasoningText(before + text)
            case ToolCallArguments(index, before), ToolCallArguments(other, text) if index == other:
                result[-1] = ToolCallArguments(index, before + text)
            case _:
                result.append(delta)
    return result
