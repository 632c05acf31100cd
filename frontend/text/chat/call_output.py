"""The deltas of one answer with calls in it: numbers the calls, and holds back what may still belong to one."""

from collections.abc import Callable
from typing import Protocol

from frontend.text.chat.deltas import ContentText, Delta, ReasoningText, ToolCallArguments, ToolCallStart


class Reader(Protocol):
    """What reads one call."""

    @property
    def name(self) -> str | None:
        """Of the tool, once the call is certain."""
        ...

    @property
    def call_id(self) -> str | None:
        """That the model gave the call; None: it gave none."""
        ...

    def take_arguments(self) -> str:
        """The arguments read since the last time."""
        ...


class CallOutput:
    """Collects deltas. Space before and after a call belongs to its marks and is left out.

    Args:
        new_call_id: makes the ids of calls to which the model gives none.
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
        """Takes what is no call."""
        text = text.lstrip() if self._follows_call else self._space + text
        content = text.rstrip()
        if content:
            self._deltas.append(ContentText(content))
            self._follows_call = False
        self._space = "" if self._follows_call else text[len(content) :]

    def open(self, mark: str) -> None:
        """A call may begin: `mark` is what says so; "" for none."""
        self._held, self._is_certain = mark, False

    def read(self, reader: Reader, text: str) -> None:
        """Takes what `reader` made of `text`."""
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

    def give_up(self) -> None:
        """What was read since `open` is no call, unless it is certain by now."""
        held, self._held = self._held, ""
        if held:
            self.content(held)

    def take(self) -> list[Delta]:
        """The deltas so far, as few as say the same."""
        deltas, self._deltas = self._deltas, []
        return merged(deltas)

    def finish(self) -> list[Delta]:
        """The answer ends here."""
        self.give_up()
        if self._space:
            self._deltas.append(ContentText(self._space))
            self._space = ""
        return self.take()


def merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours that go on with one another, as one."""
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
