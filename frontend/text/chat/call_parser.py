"""Base of the parsers of tool calls: buffers text until it is unambiguous."""

from abc import ABC, abstractmethod

from frontend.text.chat.call_output import CallOutput
from frontend.text.chat.deltas import Delta


class CallParser(ABC):
    """One answer's content and calls; an `AnswerParser`."""

    def __init__(self, output: CallOutput) -> None:
        self._output = output
        self._text = ""  # not yet unambiguous

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece; returns the deltas that are final."""
        self._text += text
        while self._text and self._advance():
            pass
        return self._output.take()

    def finish(self) -> list[Delta]:
        """Ends the answer; returns what was held back."""
        self._output.reject()
        if self._holds_content():
            self._output.content(self._text)
        return self._output.finish()

    def _holds_content(self) -> bool:
        """Whether the text left at the end is content."""
        return True

    @abstractmethod
    def _advance(self) -> bool:
        """Consumes a part of the text; False: more text is needed."""
