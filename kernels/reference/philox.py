"""Philox4x32-10, the counter-based random numbers behind sampling (Salmon et al., SC 2011,
doi:10.1145/2063384.2063405).
"""

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: tuple[npt.ArrayLike, ...], key: tuple[int, int]) -> UInt32Array:
    """Returns four random words per counter; they depend on counter and key alone.

    Args:
        counter: four words below 2^32, each a number or an array; they broadcast.
        key: two words below 2^32.
    Returns: [..., 4] uint32.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _32) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def token_words(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> UInt32Array:
    """Returns each token's random word at an output position: word (id mod 4) of counter (id div 4, position, 0, 0).

    Args:
        seed: 0 <= seed < 2^64; its low half is the first word of the key.
        position: index in the output.
        token_ids: [n].
    Returns: [n] uint32.
    """
    words = philox4x32((token_ids // 4, position, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return np.take_along_axis(words, (token_ids % 4)[:, None], axis=-1)[:, 0]
