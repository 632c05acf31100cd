"""Philox4x32-10 (Salmon et al., SC 2011) in Triton: bit for bit the words of `kernels.reference.philox`."""

import triton
import triton.language as tl

_M0 = tl.constexpr(0xD2511F53)
_M1 = tl.constexpr(0xCD9E8D57)
_W0 = tl.constexpr(0x9E3779B9)
_W1 = tl.constexpr(0xBB67AE85)


@triton.jit
def philox4x32(c0, c1, k0, k1):  # type: ignore[no-untyped-def]
    """Returns four random words for the counter (c0, c1, 0, 0) and the key (k0, k1): uint32 of the shape of c0."""
    c1 = c0 * 0 + c1
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, _M0)
        low0 = tl.mul(c0, _M0, sanitize_overflow=False)
        high1 = tl.umulhi(c2, _M1)
        low1 = tl.mul(c2, _M1, sanitize_overflow=False)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = tl.add(k0, _W0, sanitize_overflow=False)
        k1 = tl.add(k1, _W1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def token_words(ids, position, k0, k1):  # type: ignore[no-untyped-def]
    """Returns each token's random word at an output position: word (id mod 4) of counter (id div 4, position, 0, 0)."""
    w0, w1, w2, w3 = philox4x32((ids >> 2).to(tl.uint32), position, k0, k1)
    lane = ids & 3
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def group_words(groups, position, k0, k1):  # type: ignore[no-untyped-def]
    """Returns the words of tokens 4 * group to 4 * group + 3, [n] -> [n, 4]: one Philox call gives all four."""
    w0, w1, w2, w3 = philox4x32(groups.to(tl.uint32), position, k0, k1)
    lane = tl.arange(0, 4)[None, :]
    low = tl.where(lane == 0, w0[:, None], w1[:, None])
    high = tl.where(lane == 2, w2[:, None], w3[:, None])
    return tl.where(lane < 2, low, high)


@triton.jit
def load_key(seed_ptr, position_ptr, row):  # type: ignore[no-untyped-def]
    """Returns (position, k0, k1) of a row, uint32. With the token id they determine its random words."""
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row).to(tl.uint32)
    return position, (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
