"""Removes special tokens from an answer that was detokenized with them because its marks are special tokens."""

from frontend.text.chat.marks import MarkFinder


class SpecialTokenFilter:
    """Removes what `finder` matches from one answer."""

    def __init__(self, finder: MarkFinder) -> None:
        self._finder = finder
        self._held = ""

    def feed(self, text: str) -> str:
        """Takes the next piece; returns the text that is final."""
        parts = []
        found = self._finder.find(self._held + text)
        while found.mark is not None:
            parts.append(found.before)
            found = self._finder.find(found.rest)
        self._held = found.rest
        return "".join([*parts, found.before])

    def finish(self) -> str:
        """Ends the answer; returns what was held back."""
        parts = []
        found = self._finder.find_at_end(self._held)
        while found.mark is not None:
            parts.append(found.before)
            found = self._finder.find_at_end(found.rest)
        self._held = ""
        return "".join([*parts, found.before])
