"""Base of the parsers of tool calls: buffers text until it is unambiguous."""

from abc import ABC, abstractmethod

from frontend.text.chat.call_output import CallOutput
from frontend.text.chat.call_reader import ArgumentsReader, CallReader, ReaderStatus
from frontend.text.chat.deltas import Delta
from frontend.text.chat.marks import MarkFinder


class CallParser(ABC):
    """Parses one answer into content and calls; an `AnswerParser`."""

    def __init__(self, output: CallOutput) -> None:
        self._output = output
        self._text = ""  # not yet unambiguous

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece; returns the deltas that are final."""
        self._text += text
        while self._text and self._advance():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """Ends the answer; returns what was held back."""
        self._output.reject()
        if self._holds_content():
            self._output.content(self._text)
        return self._output.finish()

    def _take(self) -> list[Delta]:
        """Returns the deltas since the last call."""
        return self._output.take()

    def _holds_content(self) -> bool:
        """Returns whether the text left at the end of the answer is content."""
        return True

    def _find_opening(self, finder: MarkFinder) -> str | None:
        """Passes on the content before the first mark that may open a call, and holds back the mark.

        Returns: the mark; None: there is none in this text.
        """
        found = finder.find(self._text)
        self._output.content(found.before)
        self._text = found.rest
        if found.mark is not None:
            self._output.open(found.mark)
        return found.mark

    def _read_json(self, reader: CallReader | ArgumentsReader) -> ReaderStatus:
        """Passes the text on to the reader of a call; keeps what follows the call."""
        rest = reader.read(self._text)
        self._output.read(reader, self._text[: len(self._text) - len(rest)])
        self._text = rest
        return reader.status

    @abstractmethod
    def _advance(self) -> bool:
        """Consumes a part of the text; returns False if it needs more text."""
