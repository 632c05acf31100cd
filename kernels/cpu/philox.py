"""Philox4x32-10 (Salmon et al., SC 2011) in numba: single counters, and runs of counters in a loop LLVM vectorises."""

from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.jit import strict_inline, strict_kernel

if TYPE_CHECKING:
    from kernels.reference.philox import UInt32Array

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint64(0x9E3779B9)
_W1 = np.uint64(0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ZERO = np.uint64(0)


@strict_inline
def philox4x32(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Returns four random words below 2^32 for a counter of four words and a key of two."""
    for _ in range(10):
        product0 = c0 * _M0
        product1 = c2 * _M1
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & LOW, (product0 >> _32) ^ c3 ^ k1, product0 & LOW
        k0 = (k0 + _W0) & LOW
        k1 = (k1 + _W1) & LOW
    return c0, c1, c2, c3


@strict_kernel
def fill_words(words: "UInt32Array", first_group: int, num_groups: int, position: int, seed: np.uint64) -> None:
    """Writes the random words of tokens 4 * first_group to 4 * (first_group + num_groups) at one output position.

    Args:
        words: [4, >= num_groups] uint32, written: word w of group g goes to words[w, g]; token id = 4 * (first_group +
            g) + w.
        first_group, num_groups: counters first_group, first_group + 1, ...
        position: index in the output.
        seed: the key.
    """
    c1 = np.uint64(position)
    k0 = seed & LOW
    k1 = seed >> _32
    for g in range(num_groups):
        w0, w1, w2, w3 = philox4x32(np.uint64(first_group + g), c1, _ZERO, _ZERO, k0, k1)
        words[0, g] = w0
        words[1, g] = w1
        words[2, g] = w2
        words[3, g] = w3
