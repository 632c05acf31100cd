"""The interface of answer parsers, and the parser that combines the parts of a format."""

from typing import Protocol

from frontend.text.chat.call_output import merged
from frontend.text.chat.deltas import ContentText, Delta, ReasoningText
from frontend.text.chat.hidden import SpecialTokenFilter
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
    """Removes special tokens, separates the reasoning, and finds calls in the rest. None skips a stage."""

    def __init__(
        self, hidden: SpecialTokenFilter | None, reasoning: ReasoningSplit | None, calls: AnswerParser | None
    ) -> None:
        self._hidden = hidden
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece; returns the deltas that are final."""
        visible = text if self._hidden is None else self._hidden.feed(text)
        return merged(self._split(visible)) if visible else []

    def finish(self) -> list[Delta]:
        """Ends the answer; returns what was held back."""
        deltas: list[Delta] = []
        if self._hidden is not None:
            deltas += self._split(self._hidden.finish())
        if self._reasoning is not None:
            deltas += self._find_calls(self._reasoning.finish())
        if self._calls is not None:
            deltas += self._calls.finish()
        return merged(deltas)

    def _split(self, text: str) -> list[Delta]:
        if not text:
            return []
        return self._find_calls([ContentText(text)] if self._reasoning is None else self._reasoning.feed(text))

    def _find_calls(self, pieces: list[ReasoningText | ContentText]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            match piece:
                case ContentText(text) if self._calls is not None:
                    deltas += self._calls.feed(text)
                case _:
                    deltas.append(piece)
        return deltas
