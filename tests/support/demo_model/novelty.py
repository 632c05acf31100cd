"""Whether a text repeats a run of words of the training text.

Words are compared without case and punctuation. Runs are held as 64-bit hashes, sorted, so that the whole training
text fits in memory; a false match has a chance of about one in a million million.
"""

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

RUN_WORDS = 12

_WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


def words_of(text: str) -> list[str]:
    """The words of a text in small letters."""
    return _WORD.findall(text.lower())


class RunIndex:
    """Every run of RUN_WORDS words of a collection of texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._word_ids: dict[str, int] = {}
        found: list[Hashes] = []
        for text in texts:
            ids = [self._word_ids.setdefault(word, len(self._word_ids) + 1) for word in words_of(text)]
            found.append(_run_hashes(ids))
        self._runs: Hashes = np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._runs)

    def knows_word(self, word: str) -> bool:
        """Whether the texts contain this word."""
        return word in self._word_ids

    def copies_run(self, text: str) -> bool:
        """Whether any run of RUN_WORDS words of `text` stands in the texts."""
        ids = [self._word_ids.get(word, 0) for word in words_of(text)]
        runs = _run_hashes(ids)
        if not len(runs) or not len(self._runs):
            return False
        places = np.minimum(np.searchsorted(self._runs, runs), len(self._runs) - 1)
        return bool((self._runs[places] == runs).any())


def _run_hashes(ids: list[int]) -> Hashes:
    """The hash of each run of RUN_WORDS consecutive ids; empty for shorter texts."""
    count = len(ids) - RUN_WORDS + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    values = np.array(ids, dtype=np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(RUN_WORDS):
        hashes = (hashes ^ values[offset : offset + count]) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return hashes
