"""What a piece of an answer's text adds to the answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """Words for the user; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Words of the model to itself, before its answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls a tool; its arguments follow, before any other call starts.

    Attributes:
        index: 0 for the first call of the answer, then 1, ...
        call_id: new for each call, in the form the model's template takes back.
        name: of the tool, as the model wrote it.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments; never empty.

    All pieces of a call together are a JSON object, unless the answer ended too early or the model wrote none.
    """

    index: int
    text: str


Delta = ContentText | ReasoningText | ToolCallStart | ToolCallArguments
