"""Gumbel noise and the best score of many tokens (arXiv:1411.0030).

A score is d - log(-log(u)). A few tokens are scored in fp64, as on the CPU. A whole vocabulary is scored in fp32 first,
and in fp64 only where two scores are too close to call.

Error of an fp32 score: a token can only win if d > -26.1, since noise lies between -3.14 and 22.88 and the
largest logit has d = 0. Then d, from a difference, a reciprocal and a product, is off by at most 26.1 * 3 * 2^-24 =
4.7e-6; -log(u), made from 1 - u where u is near 1, by four parts in 10^7, so that its logarithm is off by 4e-7 and by
an ulp of a number up to 23, 1.9e-6; their sum by 1.6e-6. Scores within `_SLACK` of the best, twice the sum of all
these, are compared in fp64. Left to fp32 are pairs of tokens in the same lane of the same chunk: of 128,000 tokens, 7
share one with the winner. The two best scores come as close as `_SLACK` once in 45,000 draws, and then share a lane
once in 18,000 times, so a draw differs from the CPU's for it once in 8 * 10^8.
"""

import triton
import triton.language as tl

from kernels.gpu.philox import group_words, token_words
from kernels.gpu.token_order import INF, logit_key, place_of

_SLACK = tl.constexpr(2.2e-5)
_HALF = tl.constexpr(1 << 31)


@triton.jit
def exact_noise(words):  # type: ignore[no-untyped-def]
    """Returns -log(-log(u)) in fp64 for u = (word + 1/2) / 2^32."""
    return -tl.log(-tl.log((words.to(tl.float64) + 0.5) / 4294967296.0))


@triton.jit
def fast_noise(words):  # type: ignore[no-untyped-def]
    """Returns the value of `exact_noise` in fp32.

    In the upper half 1 - u is a small number that fp32 holds exactly where it matters, and -log(u) = 2 atanh(s) with
    s = (1 - u) / (1 + u) <= 1/3, of which the series is cut where it is below 2e-8 of the whole.
    """
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    s = rest / (2.0 - rest)
    square = s * s
    series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * (1.0 / 13.0))
    series = 1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0 + square * series))
    small = 2.0 * s * (1.0 + square * series)
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -tl.log(tl.where(words >= _HALF, small, -tl.log(tl.minimum(u, 0.75))))


@triton.jit
def exact_scores(logits, ids, top, temperature, position, k0, k1):  # type: ignore[no-untyped-def]
    """Returns scores of tokens in fp64, as the CPU computes them. logits and top are fp32, temperature is fp64."""
    d = (logits.to(tl.float64) - top.to(tl.float64)) / temperature
    return d + exact_noise(token_words(ids, position, k0, k1))


@triton.jit
def best_of_chunk(  # type: ignore[no-untyped-def]
    row_ptr,
    start,
    vocab_size,
    lowest,
    top,
    temperature,
    position,
    k0,
    k1,
    ID_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Returns the token with the best score in start:start + CHUNK with a place of at least `lowest`, or -1.

    Lane and chunk of a token follow from its id, and lanes are merged in a fixed order.
    """
    inverse = (1.0 / tl.maximum(temperature, 1e-30)).to(tl.float32)
    lanes = tl.arange(0, LANES // 4)
    best = tl.full([LANES // 4, 4], -INF, tl.float32)
    best_ids = tl.zeros([LANES // 4, 4], tl.int32)
    for offset in range(0, tl.minimum(CHUNK, vocab_size - start), LANES):
        groups = (start + offset) // 4 + lanes
        ids = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-INF)
        scores = (logits - top) * inverse + fast_noise(group_words(groups, position, k0, k1))
        is_kept = (ids < vocab_size) & (place_of(logit_key(logits), ids, ID_BITS) >= lowest)
        is_better = is_kept & (scores > best)
        best = tl.where(is_better, scores, best)
        best_ids = tl.where(is_better, ids, best_ids)
    peak = tl.max(best)
    is_close = (best > -INF) & (best >= peak - _SLACK)
    token = tl.min(tl.where(is_close, best_ids, vocab_size))
    if tl.sum(is_close.to(tl.int32)) > 1:
        logits = tl.load(row_ptr + best_ids)
        scores = exact_scores(logits, best_ids, top, temperature, position, k0, k1)
        scores = tl.where(is_close, scores, -INF)
        token = tl.min(tl.where(is_close & (scores == tl.max(scores)), best_ids, vocab_size))
    return tl.where(token < vocab_size, token, -1)
