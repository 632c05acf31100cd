"""Finds marks such as `<tool_call>` in a text that arrives in pieces, independently of chunking."""

import functools
import re
from typing import NamedTuple


class Found(NamedTuple):
    """The text around the first complete mark.

    Attributes:
        before: text before the mark, without marks.
        mark: the mark; None if there is none yet.
        rest: text after the mark; without a mark, the end of the text that may be the start of one.
    """

    before: str
    mark: str | None
    rest: str


class MarkFinder:
    """Finds the leftmost mark, and the longest if several start there. Create it with `mark_finder`.

    Args:
        marks: non-empty texts.
    """

    def __init__(self, marks: frozenset[str]) -> None:
        longest_first = sorted(marks, key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(mark[:end] for mark in marks for end in range(1, len(mark)))
        self._most_held = max(map(len, self._beginnings), default=0)

    def find(self, text: str) -> Found:
        """Searches the text that has not been passed on."""
        certain = len(text) - self._num_held(text)
        match = self._pattern.search(text)
        if match is not None and match.start() < certain:
            return Found(text[: match.start()], match[0], text[match.end() :])
        return Found(text[:certain], None, text[certain:])

    def find_at_end(self, text: str) -> Found:
        """Searches the end of the text; holds nothing back."""
        match = self._pattern.search(text)
        return Found(text, None, "") if match is None else Found(text[: match.start()], match[0], text[match.end() :])

    def _num_held(self, text: str) -> int:
        for length in range(min(len(text), self._most_held), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


@functools.lru_cache(maxsize=64)  # for a few models with their special tokens and marks
def mark_finder(marks: frozenset[str]) -> MarkFinder:
    """Returns the finder of these marks, which all answers share."""
    return MarkFinder(marks)
