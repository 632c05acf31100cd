"""The seam between a chat door and the formats of answers, and the parser made of the parts a format has."""

from typing import Protocol

from frontend.text.chat.call_output import merged
from frontend.text.chat.deltas import ContentText, Delta, ReasoningText
from frontend.text.chat.hidden import HiddenTexts
from frontend.text.chat.reasoning import ReasoningSplit


class AnswerParser(Protocol):
    """Takes one answer apart while it arrives. However the text is cut into pieces, the deltas say the same.

    No text makes it raise: what only looks like a call, or stops half-way in its name, comes out as content.
    """

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece; returns what is certain by now."""
        ...

    def finish(self) -> list[Delta]:
        """The answer ends here: returns what was held back."""
        ...


class StagedParser:
    """Hidden texts out, then the reasoning split off, then calls found in the rest; None: there is no such part."""

    def __init__(
        self, hidden: HiddenTexts | None, reasoning: ReasoningSplit | None, calls: AnswerParser | None
    ) -> None:
        self._hidden = hidden
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece; returns what is certain by now."""
        visible = text if self._hidden is None else self._hidden.feed(text)
        return merged(self._split(visible)) if visible else []

    def finish(self) -> list[Delta]:
        """The answer ends here: returns what was held back."""
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
