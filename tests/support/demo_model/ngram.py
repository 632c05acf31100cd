"""A 3-gram model with interpolated Kneser-Ney smoothing: the baseline that the demo model has to beat.

Trained and scored on the same token ids as the model. Each order discounts by n1 / (n1 + 2 n2) of its own counts and
backs off to the next lower order's continuation counts, the lowest to a uniform distribution. Knows nothing of text.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class _Table(NamedTuple):
    """Counts by key; keys sorted."""

    keys: Ids
    counts: Floats

    def look_up(self, keys: Ids) -> Floats:
        """The count of each key, zero where it is unknown."""
        if not len(self.keys):
            return np.zeros(len(keys))
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[places] == keys, self.counts[places], 0.0)


def _count(keys: Ids) -> _Table:
    found, counts = np.unique(keys, return_counts=True)
    return _Table(found, counts.astype(np.float64))


def _sum_by(keys: Ids, weights: Floats) -> _Table:
    found, inverse = np.unique(keys, return_inverse=True)
    totals = np.bincount(inverse, weights=weights, minlength=len(found))
    return _Table(found, totals.astype(np.float64))


def _discount(counts: Floats) -> float:
    ones, twos = float((counts == 1).sum()), float((counts == 2).sum())
    return ones / (ones + 2 * twos) if ones else 0.5


class TrigramModel:
    """Kneser-Ney 3-gram over token ids below `vocab_size`; the id `vocab_size` stands before each document."""

    def __init__(self, documents: list[Ids], vocab_size: int) -> None:
        self._base = vocab_size + 1
        self._vocab_size = vocab_size
        before, last, nexts = self._trigrams(documents)
        trigrams = _count((before * self._base + last) * self._base + nexts)
        self._trigrams_seen = trigrams
        self._discount3 = _discount(trigrams.counts)
        contexts = trigrams.keys // self._base
        self._context_totals = _sum_by(contexts, trigrams.counts)
        self._context_types = _count(contexts)
        pairs = _count(trigrams.keys % (self._base * self._base))
        self._pairs = pairs
        self._discount2 = _discount(pairs.counts)
        self._pair_totals = _sum_by(pairs.keys // self._base, pairs.counts)
        self._pair_types = _count(pairs.keys // self._base)
        singles = _count(pairs.keys % self._base)
        self._singles = singles
        self._discount1 = _discount(singles.counts)
        self._single_total = float(singles.counts.sum())

    def _trigrams(self, documents: list[Ids]) -> tuple[Ids, Ids, Ids]:
        before, last, nexts = [], [], []
        for tokens in documents:
            padded = np.concatenate([[self._vocab_size], tokens]).astype(np.int64)
            before.append(padded[:-2])
            last.append(padded[1:-1])
            nexts.append(padded[2:])
        return np.concatenate(before), np.concatenate(last), np.concatenate(nexts)

    def probabilities(self, before: Ids, last: Ids, nexts: Ids) -> Floats:
        """P(next | before, last) of each triple."""
        unigram = np.maximum(self._singles.look_up(nexts) - self._discount1, 0.0) / self._single_total
        unigram += self._discount1 * len(self._singles.keys) / self._single_total / self._vocab_size
        bigram = _interpolate(
            self._pairs.look_up(last * self._base + nexts),
            self._pair_totals.look_up(last),
            self._pair_types.look_up(last),
            self._discount2,
            unigram,
        )
        context = before * self._base + last
        return _interpolate(
            self._trigrams_seen.look_up(context * self._base + nexts),
            self._context_totals.look_up(context),
            self._context_types.look_up(context),
            self._discount3,
            bigram,
        )

    def loss(self, documents: list[Ids]) -> float:
        """Mean negative log likelihood, in nats a token, of every token after a document's first."""
        probabilities = self.probabilities(*self._trigrams(documents))
        return float(-np.log(probabilities).mean())


def _interpolate(counts: Floats, totals: Floats, types: Floats, discount: float, lower: Floats) -> Floats:
    known = totals > 0
    safe = np.where(known, totals, 1.0)
    higher = np.maximum(counts - discount, 0.0) / safe + discount * types / safe * lower
    return np.where(known, higher, lower)
