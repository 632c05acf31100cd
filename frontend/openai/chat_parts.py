"""The parts of a chat answer (content, reasoning, tool calls) as OpenAI's objects."""

from collections.abc import Sequence

from frontend.chat import AnswerParser, ContentText, Delta, ReasoningText, ToolCallArguments, ToolCallStart
from frontend.openai.job import JsonObject


class ChatAnswer:
    """One answer while it is taken apart.

    Args:
        parser: tells the parts from each other.
        one_call_only: leave out all calls but the first.

    Attributes:
        has_calls: whether a call has been seen.
    """

    def __init__(self, parser: AnswerParser, *, one_call_only: bool) -> None:
        self._parser = parser
        self._one_call_only = one_call_only
        self.has_calls = False

    def feed(self, text: str) -> list[Delta]:
        """The parts of the next piece of text."""
        return self._kept(self._parser.feed(text))

    def finish(self) -> list[Delta]:
        """What was held back."""
        return self._kept(self._parser.finish())

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        kept = [delta for delta in deltas if not (self._one_call_only and _call_index(delta))]
        self.has_calls |= any(isinstance(delta, ToolCallStart) for delta in kept)
        return kept


def _call_index(delta: Delta) -> int:
    return delta.index if isinstance(delta, ToolCallStart | ToolCallArguments) else 0


def delta_object(delta: Delta) -> JsonObject:
    """A delta of a stream."""
    match delta:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text}
        case ToolCallStart():
            return {"tool_calls": [{"index": delta.index, **_call(delta)}]}
        case ToolCallArguments():
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def message_object(deltas: Sequence[Delta]) -> JsonObject:
    """The message that all deltas of an answer add up to."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentText))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningText))
    calls: list[JsonObject] = []
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            calls.append(_call(delta))
        elif isinstance(delta, ToolCallArguments):
            calls[-1]["function"]["arguments"] += delta.text
    message: JsonObject = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(start: ToolCallStart) -> JsonObject:
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": ""}}
