"""Removes marks from a text that arrives in pieces."""

from collections.abc import Callable

from frontend.text.chat.marks import Found, MarkFinder


class MarkFilter:
    """Removes what `finder` matches from one answer."""

    def __init__(self, finder: MarkFinder) -> None:
        self._finder = finder
        self._held = ""

    def feed(self, text: str) -> str:
        """Takes the next piece; returns the text that is final."""
        return self._visible(self._held + text, self._finder.find)

    def finish(self) -> str:
        """Ends the answer; returns what was held back."""
        return self._visible(self._held, self._finder.find_at_end)

    def _visible(self, text: str, find: Callable[[str], Found]) -> str:
        parts = []
        found = find(text)
        while found.mark is not None:
            parts.append(found.before)
            found = find(found.rest)
        self._held = found.rest
        return "".join([*parts, found.before])
