"""Deltas: what a piece of text adds to the parts of an answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Reasoning before the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a tool call; its arguments follow before another call starts.

    Attributes:
        index: 0 for the first call of the answer, then 1, ...
        call_id: unique id in the format that the model's template accepts.
        name: name of the tool, as generated.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments; never empty.

    The pieces of a call form a JSON object, unless the answer was cut off or the model generated something else.
    """

    index: int
    text: str


Delta = ContentText | ReasoningText | ToolCallStart | ToolCallArguments
