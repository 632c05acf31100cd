"""The interface of answer parsers, and the parser that combines the parts of a format."""

from collections.abc import Sequence
from typing import Protocol

from frontend.text.chat.call_output import merged
from frontend.text.chat.deltas import ContentText, Delta, ReasoningText
from frontend.text.chat.reasoning import ReasoningSplit


class AnswerParser(Protocol):
    """Parses one answer incrementally. The result does not depend on how the text is chunked.

    It never raises: text that only resembles a call, or a call that is cut off before the end of its name, is content.
    """

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece; returns the deltas that are final."""
        ...

    def finish(self) -> list[Delta]:
        """Ends the answer; returns what was held back."""
        ...


class StagedParser:
    """Separates the reasoning, and finds calls in the rest. None skips a stage."""

    def __init__(self, reasoning: ReasoningSplit | None, calls: AnswerParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece; returns the deltas that are final."""
        if not text:
            return []
        pieces = [ContentText(text)] if self._reasoning is None else self._reasoning.feed(text)
        return merged(self._find_calls(pieces))

    def finish(self) -> list[Delta]:
        """Ends the answer; returns what was held back."""
        deltas: list[Delta] = []
        if self._reasoning is not None:
            deltas += self._find_calls(self._reasoning.finish())
        if self._calls is not None:
            deltas += self._calls.finish()
        return merged(deltas)

    def _find_calls(self, pieces: Sequence[ReasoningText | ContentText]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            match piece:
                case ContentText(text) if self._calls is not None:
                    deltas += self._calls.feed(text)
                case _:
                    deltas.append(piece)
        return deltas
