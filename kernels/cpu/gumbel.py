"""Gumbel-max draws (arXiv:1411.0030) with noise from Philox: exact, with logarithms for few tokens only.

A token wins only with a score above the best so far. A table bounds its noise by the leading bits of its random word,
so two logarithms are computed only for tokens that may win: some dozens of a vocabulary of 150,000.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.jit import strict_inline, strict_kernel
from kernels.cpu.philox import LOW, fill_words, philox4x32

if TYPE_CHECKING:
    from kernels.cpu.arrays import Doubles, Floats, Ints

_TABLE_SHIFT = np.uint32(20)
_NOISE_BOUND = -np.log(-np.log((np.arange(1, 4097) * 2.0**20 - 0.5) / 2.0**32))
_SLACK = 1e-6  # the bound's own rounding; scores that matter are below 50
_CHUNK_GROUPS = 256


@strict_inline
def _noise(word: np.uint32) -> float:
    return -math.log(-math.log((np.float64(word) + 0.5) / 4294967296.0))


@strict_kernel
def draw_from(ids: "Ints", d: "Doubles", seed: np.uint64, position: int) -> int:
    """Draws a token with probability proportional to exp(d).

    Args:
        ids: [n] candidates, n >= 1, ascending.
        d: [n], finite.
        seed, position: key and counter of the noise.
    Returns: the id.
    """
    zero = np.uint64(0)
    best_id = -1
    best = -np.inf
    group = -1
    w0 = w1 = w2 = w3 = zero
    for i in range(len(ids)):
        token_id = int(ids[i])
        if token_id >> 2 != group:
            group = token_id >> 2
            w0, w1, w2, w3 = philox4x32(
                np.uint64(group), np.uint64(position), zero, zero, seed & LOW, seed >> np.uint64(32)
            )
        lane = token_id & 3
        word = np.uint32(w0 if lane == 0 else w1 if lane == 1 else w2 if lane == 2 else w3)
        if d[i] + _NOISE_BOUND[word >> _TABLE_SHIFT] + _SLACK > best:
            score = d[i] + _noise(word)
            if score > best:
                best, best_id = score, token_id
    return best_id


@strict_kernel
def draw_from_all(values: "Floats", top_id: int, temperature: float, seed: np.uint64, position: int) -> int:
    """Draws a token with probability proportional to exp(value / temperature).

    Args:
        values: [vocab_size], at least one finite, none NaN or +inf.
        top_id: index of a largest value: its score is a good first bound.
        temperature: > 0.
        seed, position: key and counter of the noise.
    Returns: the id.
    """
    words = np.empty((4, _CHUNK_GROUPS), dtype=np.uint32)
    top = np.float64(values[top_id])
    inverse = 1.0 / temperature
    fill_words(words, top_id >> 2, 1, position, seed)
    best = _noise(words[top_id & 3, 0])
    best_id = top_id
    for start in range(0, len(values), 4 * _CHUNK_GROUPS):
        stop = min(len(values), start + 4 * _CHUNK_GROUPS)
        fill_words(words, start >> 2, (stop - start + 3) >> 2, position, seed)
        for token_id in range(start, stop):
            word = words[token_id & 3, (token_id - start) >> 2]
            if (np.float64(values[token_id]) - top) * inverse + _NOISE_BOUND[word >> _TABLE_SHIFT] + _SLACK >= best:
                score = (np.float64(values[token_id]) - top) / temperature + _noise(word)
                if score > best or (score == best and token_id < best_id):
                    best, best_id = score, token_id
    return best_id
