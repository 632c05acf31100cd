"""LRU cache of compiled formats, limited in bytes."""

from collections import OrderedDict
from dataclasses import dataclass

_ENTRY_BYTES = 512  # besides the text


@dataclass(frozen=True, slots=True)
class Outcome:
    """A grammar, or why there is none.

    Attributes:
        grammar: empty if there is an error.
        error: for the client.
    """

    grammar: str = ""
    error: str = ""


class OutcomeCache:
    """Outcomes by key; evicts the least recently used one first.

    Args:
        max_bytes: of all texts in it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[Outcome, float]] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes, now_s: float) -> Outcome | None:
        """Returns a cached outcome; None: there is none, or it has expired."""
        entry = self._entries.get(key)
        if entry is None or entry[1] <= now_s:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, outcome: Outcome, *, until_s: float = float("inf")) -> None:
        """Keeps an outcome.

        Args:
            until_s: how long it holds, as `now_s`.
        """
        self._drop(key)
        self._entries[key] = outcome, until_s
        self.num_bytes += _num_bytes(outcome)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= _num_bytes(entry[0])


def _num_bytes(outcome: Outcome) -> int:
    return _ENTRY_BYTES + len(outcome.grammar) + len(outcome.error)  # the library's JSON is ASCII
