"""Sets of token ids as bit masks for the sampler: bit i % 32 of word i // 32 is set if token i is in the set."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]


def num_words(vocab_size: int) -> int:
    """Returns the length of a mask over tokens 0 to vocab_size - 1."""
    return -(-vocab_size // 32)


def words_of(token_ids: Iterable[int], vocab_size: int) -> Words:
    """Returns the mask of these tokens."""
    bits = np.zeros(32 * num_words(vocab_size), dtype=np.bool_)
    bits[np.fromiter(token_ids, dtype=np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def all_words(vocab_size: int) -> Words:
    """Returns the mask of all tokens; bits after the last one are 0."""
    return np.packbits(np.arange(32 * num_words(vocab_size)) < vocab_size, bitorder="little").view(np.int32)


def remove(words: Words, token_ids: Iterable[int]) -> None:
    """Removes a few tokens from a mask."""
    bits = words.view(np.uint8)
    for token_id in token_ids:
        bits[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
