"""What the parsers of all forms of calls share: text that comes in pieces, looked at as far as it is certain."""

from abc import ABC, abstractmethod

from frontend.text.chat.call_output import CallOutput
from frontend.text.chat.deltas import Delta


class CallParser(ABC):
    """One answer's content and calls; an `AnswerParser`."""

    def __init__(self, output: CallOutput) -> None:
        self._output = output
        self._text = ""  # that is not certain yet

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece; returns what is certain by now."""
        self._text += text
        while self._text and self._advance():
            pass
        return self._output.take()

    def finish(self) -> list[Delta]:
        """The answer ends here: returns what was held back."""
        self._output.give_up()
        if self._holds_content():
            self._output.content(self._text)
        return self._output.finish()

    def _holds_content(self) -> bool:
        """Whether text that is left at the end is content."""
        return True

    @abstractmethod
    def _advance(self) -> bool:
        """Looks at the text once; False: more is needed."""
