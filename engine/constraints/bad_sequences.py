"""Token sequences that the output must not contain."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

_Ids = tuple[int, ...]


class BadSequences:
    """Finds the tokens that would complete a forbidden sequence of two or more tokens.

    Sequences of one token are masked statically elsewhere, and ignored here.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        # By the token before the last: (all tokens before the last, the last).
        self._by_newest: defaultdict[int, list[tuple[_Ids, int]]] = defaultdict(list)
        for *beginning, last in sequences:
            if beginning:
                self._by_newest[beginning[-1]].append((tuple(beginning), last))
        beginnings = (beginning for found in self._by_newest.values() for beginning, _ in found)
        self._max_length = max(map(len, beginnings), default=0)
        self._newest: _Ids = ()

    def __bool__(self) -> bool:
        return bool(self._by_newest)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Appends tokens to the output."""
        self._newest = (*self._newest, *token_ids)[-self._max_length :]

    def forbidden_ids(self) -> list[int]:
        """Returns the tokens that must not be drawn next."""
        newest = self._newest
        if not newest:
            return []
        return [
            last
            for beginning, last in self._by_newest.get(newest[-1], ())
            if newest[len(newest) - len(beginning) :] == beginning
        ]
