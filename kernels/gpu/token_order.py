"""The order of tokens that all filters share, as integers: the largest logit first, equal logits by lowest id.

Integer comparisons are exact, need no special case for -0.0 and allow a threshold to be found by bisection.
"""

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))

LOWEST_KEY = tl.constexpr(-2139095040)
"""Key of the lowest finite float; that of -inf is one less."""

NO_PLACE = tl.constexpr(-(1 << 62))
"""A place below that of every token."""


@triton.jit
def logit_key(x):  # type: ignore[no-untyped-def]
    """Returns int32 keys in the order of the floats x, which are not NaN; 0.0 and -0.0 have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_logit(key):  # type: ignore[no-untyped-def]
    """Returns the float with this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place_of(keys, ids, ID_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns an int64 that is larger for earlier tokens: the key, then the id counted from above; ids < 2^ID_BITS."""
    return (keys.to(tl.int64) << ID_BITS) + ((1 << ID_BITS) - 1 - ids)


@triton.jit
def first_place(key, ID_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the largest place of a token with this key, plus one."""
    return (key.to(tl.int64) + 1) << ID_BITS


@triton.jit
def last_place(key, ID_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the smallest place of a token with this key."""
    return key.to(tl.int64) << ID_BITS


@triton.jit
def place_id(place, ID_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the id of the token at a place, int64."""
    return (1 << ID_BITS) - 1 - (place & ((1 << ID_BITS) - 1))


@triton.jit
def place_key(place, ID_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the key of the token at a place, int32."""
    return (place >> ID_BITS).to(tl.int32)


@triton.jit
def row_pointer(  # type: ignore[no-untyped-def]
    raw_ptr, adjusted_ptr, is_adjusted_ptr, row, vocab_size, HAS_ADJUSTED: tl.constexpr
):
    """Returns a pointer to a row's logits: to the adjusted ones if it has any penalty, bias or mask."""
    offset = row.to(tl.int64) * vocab_size
    pointer = raw_ptr + offset
    if HAS_ADJUSTED:
        pointer = tl.where(tl.load(is_adjusted_ptr + row) != 0, adjusted_ptr + offset, pointer)
    return pointer
