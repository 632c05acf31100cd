"""Separates reasoning from the answer: `<think>...</think>` at the start."""

import enum
from dataclasses import dataclass

from frontend.text.chat.deltas import ContentText, ReasoningText
from frontend.text.chat.hidden import MarkFilter
from frontend.text.chat.marks import mark_finder


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks before and after the reasoning.

    Attributes:
        answer: marks before and after the answer that follows; empty without such marks.
    """

    opening: str
    closing: str
    answer: tuple[str, str] | tuple[()] = ()

    @property
    def texts(self) -> frozenset[str]:
        """All marks."""
        return frozenset({self.opening, self.closing, *self.answer})

    def seen_in(self, template: str) -> bool:
        """Returns whether a chat template contains the closing marks."""
        return self.closing in template and (not self.answer or self.answer[1] in template)

    def opened_by(self, prompt: str) -> bool:
        """Returns whether the prompt ends with the opening mark, as some templates' prompts do."""
        return prompt.rstrip().endswith(self.opening)


class _Place(enum.Enum):
    BEFORE = "before"  # the reasoning may still start
    INSIDE = "inside"
    BETWEEN = "between"  # newlines after the closing mark
    AFTER = "after"


class ReasoningSplit:
    """Separates one answer's reasoning from its content.

    Omits line breaks next to the marks. Marks after the reasoning are content. Without an opening mark at the start of
    the answer or the end of the prompt, the whole answer is content.

    Args:
        marks: the model's marks.
        opened: whether the prompt opened the reasoning; the answer may then repeat the opening mark.
    """

    def __init__(self, marks: ReasoningMarks, *, opened: bool) -> None:
        self._opening = marks.opening
        self._closing = mark_finder(frozenset({marks.closing}))
        self._answer_opening = marks.answer[0] if marks.answer else ""
        self._answer_closing = MarkFilter(mark_finder(frozenset({marks.answer[1]}))) if marks.answer else None
        self._in_answer = False  # after the opening mark of the answer
        self._opened = opened
        self._place = _Place.BEFORE
        self._text = ""  # not passed on yet
        self._newlines = ""  # at the end of the reasoning so far, before _text
        self._has_reasoned = False

    def feed(self, text: str) -> list[ReasoningText | ContentText]:
        """Takes the next piece; returns the deltas that are final."""
        self._text += text
        reasoning = content = ""
        if self._place is _Place.BEFORE:
            self._enter()
        if self._place is _Place.INSIDE:
            reasoning = self._take_reasoning()
        if self._place is _Place.BETWEEN:
            self._begin_answer()
        if self._place is _Place.AFTER:
            content, self._text = self._text, ""
            if self._in_answer and self._answer_closing is not None:
                content = self._answer_closing.feed(content)
        return _deltas(reasoning, content)

    def finish(self) -> list[ReasoningText | ContentText]:
        """Ends the answer; returns what was held back."""
        held, self._text = self._text, ""
        if self._place is _Place.INSIDE or (self._place is _Place.BEFORE and self._opened):
            held = self._newlines + held
            return _deltas(held if self._has_reasoned else held.lstrip("\n"), "")
        if self._in_answer and self._answer_closing is not None:
            held += self._answer_closing.finish()
        return _deltas("", held)

    def _begin_answer(self) -> None:
        self._text = self._text.lstrip("\n")
        if self._answer_opening and self._text.startswith(self._answer_opening):
            self._text = self._text.removeprefix(self._answer_opening).lstrip("\n")
            self._in_answer, self._answer_opening = True, ""
        elif self._text and self._answer_opening.startswith(self._text):
            return
        if self._text:
            self._place = _Place.AFTER

    def _enter(self) -> None:
        start = self._text.lstrip()
        if start.startswith(self._opening):
            self._place, self._text = _Place.INSIDE, start.removeprefix(self._opening)
        elif not self._opening.startswith(start):
            self._place = _Place.INSIDE if self._opened else _Place.AFTER

    def _take_reasoning(self) -> str:
        found = self._closing.find(self._text)
        text = self._newlines + found.before
        if not self._has_reasoned:
            text = text.lstrip("\n")
        reasoning = text.rstrip("\n")
        self._text, self._newlines = found.rest, text[len(reasoning) :]
        self._has_reasoned |= bool(reasoning)
        if found.mark is not None:
            self._place, self._newlines = _Place.BETWEEN, ""
        return reasoning


def _deltas(reasoning: str, content: str) -> list[ReasoningText | ContentText]:
    deltas: list[ReasoningText | ContentText] = []
    if reasoning:
        deltas.append(ReasoningText(reasoning))
    if content:
        deltas.append(ContentText(content))
    return deltas
