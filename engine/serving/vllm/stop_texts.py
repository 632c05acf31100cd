"""Ends an answer at a stop text. The engine has no text: it compares bytes, as tokens spell them in the vocabulary."""

from collections.abc import Callable, Sequence


class StopTextMatcher:
    """Finds the first stop text in the bytes of one answer; of several that end at the same token, the one that ends
    first, of these the longest.

    Args:
        stop_texts: at least one, none empty.
        bytes_of: spells a token.
    """

    def __init__(self, stop_texts: Sequence[str], bytes_of: Callable[[int], bytes]) -> None:
        self._stops = [(text.encode(), text) for text in stop_texts]
        self._bytes_of = bytes_of
        self._num_kept = max(len(data) for data, _ in self._stops) - 1  # a match may begin in these
        self._tail = b""

    def push(self, token_id: int, *, may_match: bool = True) -> str | None:
        """Takes the next token; returns the stop text that it completes, if any.

        Args:
            may_match: whether a stop text that this token completes counts. Later ones may begin in it anyway.
        """
        num_known = len(self._tail)
        text = self._tail + self._bytes_of(token_id)
        if may_match:
            matches = [
                (start + len(data), -len(data), stop)
                for data, stop in self._stops
                if (start := text.find(data, max(num_known - len(data) + 1, 0))) >= 0
            ]
            if matches:
                return min(matches)[2]
        self._tail = text[len(text) - self._num_kept :] if self._num_kept < len(text) else text
        return None
