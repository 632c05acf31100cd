"""Philox4x32-10 against the known answers published with its authors' library (Random123, kat_vectors)."""

import numpy as np
import pytest

from kernels.reference.philox import philox4x32, token_words

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    assert philox4x32(counter, key).tolist() == list(words)


def test_counters_broadcast():
    words = philox4x32((np.arange(5), 7, 0, 0), (1, 2))
    assert words.shape == (5, 4)
    assert words[3].tolist() == philox4x32((3, 7, 0, 0), (1, 2)).tolist()


def test_token_words_are_keyed_by_seed_position_and_token():
    seed = 0xA4093822_299F31D0
    words = token_words(seed, 9, np.arange(10))
    for token_id in range(10):
        counter = (token_id // 4, 9, 0, 0)
        assert words[token_id] == philox4x32(counter, (0x299F31D0, 0xA4093822))[token_id % 4]
    assert (token_words(seed, 10, np.arange(10)) != words).all()
    assert (token_words(seed ^ 1, 9, np.arange(10)) != words).all()
    assert (token_words(seed ^ 1 << 63, 9, np.arange(10)) != words).all()
