"""Leaves texts out of an answer: special tokens that came along because the marks of the answer are special tokens."""

from frontend.text.chat.marks import MarkFinder


class HiddenTexts:
    """One answer without what `finder` finds."""

    def __init__(self, finder: MarkFinder) -> None:
        self._finder = finder
        self._held = ""

    def feed(self, text: str) -> str:
        """Takes the next piece; returns what may be passed on."""
        parts = []
        found = self._finder.find(self._held + text)
        while found.mark is not None:
            parts.append(found.before)
            found = self._finder.find(found.rest)
        self._held = found.rest
        return "".join([*parts, found.before])

    def finish(self) -> str:
        """The end: returns what was held back."""
        parts = []
        found = self._finder.find_at_end(self._held)
        while found.mark is not None:
            parts.append(found.before)
            found = self._finder.find_at_end(found.rest)
        self._held = ""
        return "".join([*parts, found.before])
