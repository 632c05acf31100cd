"""Finds the log-probabilities of a text among those of all tokens: marks, reasoning and calls have tokens too.

Text may come later than its tokens, while a character or something like a mark is incomplete.
"""

from frontend.api.http.response_builder import JsonObject


class TextLogprobs:
    """Rows of one answer, as `logprob_rows` makes them, that are not part of any text yet."""

    def __init__(self) -> None:
        self._rows: list[JsonObject] = []

    def add(self, rows: list[JsonObject]) -> None:
        """Takes the rows of the next tokens."""
        self._rows += rows

    def take(self, text: str, *, begins: bool) -> list[JsonObject]:
        """Returns the rows of the next piece of text, and drops those before it.

        Args:
            begins: nothing of this text has come before, so that tokens of something else may stand before its own.
        """
        data, wanted = b"".join(bytes(row["bytes"]) for row in self._rows), text.encode()
        start = data.rfind(wanted) if begins else data.find(wanted)
        if start < 0:  # the tokens do not spell the text: replaced characters
            taken, self._rows = self._rows, []
            return taken
        end = start + len(wanted)
        taken, kept, offset = [], [], 0
        for row in self._rows:
            if offset >= end:
                kept.append(row)
            elif offset + len(row["bytes"]) > start:
                taken.append(row)
            offset += len(row["bytes"])
        self._rows = kept
        return taken
