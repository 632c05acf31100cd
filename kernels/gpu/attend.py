"""The part common to both attention kernels: gathers a range of keys of one row from their blocks and takes the steps
of the online softmax (arXiv:2307.08691) over them.

Scores are in base 2, sums in fp32. How programs divide the batch is up to the kernels.

Products of 8-bit keys and values are taken in fp16, whatever the dtype of the queries: e4m3 becomes fp16 exactly, two
values with one instruction, where on Hopper bfloat16 costs two more of a unit that does 16 per clock, which is slower
than the memory delivers them. Each row of queries is divided by a power of two to fit into fp16.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
_WEIGHT_SCALE = tl.constexpr(32.0)
"""With 8-bit values, weights are multiplied by their scales in fp16. 32 times that is in its range for tokens whose
values go up to anything between 0.01 and 900,000; it is divided out at the end."""
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_queries(  # type: ignore[no-untyped-def]
    ptrs,
    is_used,
    score_scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):
    """Loads queries in the dtype of products, with zeros where they are not used.

    Args:
        ptrs, is_used: [BLOCK_M], of their first values.
        score_scale: factor of their base-2 scores.
        BLOCK_D: of the first VALUE_DIM values.
        BLOCK_R: of the others; only with latents, see `attend`.
    Returns: the first values [BLOCK_M, BLOCK_D], the others [BLOCK_M, BLOCK_R], and the factor of the base-2 scores: a
        number, or one per row.
    """
    columns = tl.arange(0, BLOCK_D)
    q = tl.load(ptrs[:, None] + columns[None, :], mask=is_used[:, None] & (columns < VALUE_DIM)[None, :], other=0.0)
    rest = q
    if VALUE_DIM < HEAD_DIM:
        columns = VALUE_DIM + tl.arange(0, BLOCK_R)
        mask = is_used[:, None] & (columns < HEAD_DIM)[None, :]
        rest = tl.load(ptrs[:, None] + columns[None, :], mask=mask, other=0.0)
    factor = score_scale
    if IS_QUANTIZED:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1, keep_dims=True)
        if VALUE_DIM < HEAD_DIM:
            largest = tl.maximum(largest, tl.max(tl.abs(rest.to(tl.float32)), 1, keep_dims=True))
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power == 0.0, 1.0, power)
        factor = score_scale * power
        rest = _divided(rest, power)
        q = _divided(q, power)
    return q, rest, factor


@triton.jit
def _divided(q, power):  # type: ignore[no-untyped-def]
    divided = q.to(tl.float32) / power
    if q.dtype != tl.float32:
        divided = divided.to(tl.float16)
    return divided


@triton.jit
def start_state(  # type: ignore[no-untyped-def]
    block_table_ptr,
    start_key,
    end_key,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Returns the state of `attend` before its first step.

    It consists of acc [BLOCK_M, BLOCK_D], row_max and row_sum [BLOCK_M, 1], and the blocks of the first keys.
    """
    return (
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        tl.full((BLOCK_M, 1), -float("inf"), tl.float32),
        tl.zeros((BLOCK_M, 1), tl.float32),
        _load_block_ids(block_table_ptr, start_key, end_key, BLOCK_N, BLOCK_SIZE),
    )


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    q,
    q_rest,
    state,
    start_key,
    stop_key,
    first_key,
    end_key,
    positions,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    block_table_ptr,
    kv_head,
    num_kv_heads,
    sliding_window,
    score_scale,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Takes steps of BLOCK_N keys from start_key, a multiple of it, until stop_key is reached.

    Args:
        q, q_rest, score_scale: of `load_queries`.
        state: of `start_state`, or of the steps before.
        first_key, end_key: no key outside of first_key:end_key is read.
        positions: [BLOCK_M], of the query tokens.
        soft_cap: scores become soft_cap * tanh(score / soft_cap), if HAS_SOFT_CAP.
        VALUE_DIM: size of a value; below HEAD_DIM the values are latents, the first VALUE_DIM numbers of the keys.
        IS_MASKED: some row does not see some key of the range, or some key is outside of first_key:end_key.
    Returns: the new state.
    """
    acc, row_max, row_sum, block_ids = state
    for start in range(start_key, stop_key, BLOCK_N):
        # The ids of the next step are loaded in this one, so that the pipeline of key loads never waits for an address.
        next_block_ids = _load_block_ids(block_table_ptr, start + BLOCK_N, end_key, BLOCK_N, BLOCK_SIZE)
        keys = start + tl.arange(0, BLOCK_N)
        slots = _slots(block_ids, keys, kv_head, num_kv_heads, BLOCK_SIZE)
        is_readable = (keys >= first_key) & (keys < end_key)

        k = _load_rows(k_ptr, slots, is_readable, HEAD_DIM, VALUE_DIM, q.shape[1], IS_MASKED).to(q.dtype)
        scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if VALUE_DIM < HEAD_DIM:
            k_rest = _load_rows(
                k_ptr + VALUE_DIM, slots, is_readable, HEAD_DIM, HEAD_DIM - VALUE_DIM, q_rest.shape[1], IS_MASKED
            )
            scores = dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores)
        if IS_QUANTIZED:
            scores *= _load_scales(k_scales_ptr, slots, is_readable, IS_MASKED)[None, :]
        if HAS_SOFT_CAP:
            decay = tl.exp2(tl.abs(scores) * (-2.0 * score_scale / soft_cap))
            capped = (LOG2_E * soft_cap) * (1.0 - decay) / (1.0 + decay)
            scores = tl.where(scores < 0.0, -capped, capped)
            factor = 1.0
        else:
            factor = score_scale
        if IS_MASKED:
            is_visible = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_visible &= keys[None, :] > positions[:, None] - sliding_window
            scores = tl.where(is_visible, scores, -float("inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1, keep_dims=True) * factor)
        if IS_MASKED:  # a row that has seen no key yet would subtract -inf from -inf
            finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        else:
            finite_max = new_max
        weights = tl.exp2(scores * factor - finite_max)
        correction = tl.exp2(row_max - finite_max)
        row_sum = row_sum * correction + tl.sum(weights, 1, keep_dims=True)
        row_max = new_max

        if IS_QUANTIZED:
            weights *= _WEIGHT_SCALE * _load_scales(v_scales_ptr, slots, is_readable, IS_MASKED)[None, :]
        v = k
        if VALUE_DIM == HEAD_DIM:
            v = _load_rows(v_ptr, slots, is_readable, HEAD_DIM, HEAD_DIM, acc.shape[1], IS_MASKED).to(q.dtype)
        acc = dot(weights.to(q.dtype), v, acc * correction)
        block_ids = next_block_ids
    return acc, row_max, row_sum, block_ids


@triton.jit
def _load_block_ids(  # type: ignore[no-untyped-def]
    block_table_ptr, start, end_key, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Loads the blocks of keys start:start + BLOCK_N of a row: one id where all share a block, else one per key.

    Entries for keys from end_key on are not read.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block_ids = tl.load(block_table_ptr + start // BLOCK_SIZE, mask=start < end_key, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        block_ids = tl.load(block_table_ptr + keys // BLOCK_SIZE, mask=keys < end_key, other=0)
    return block_ids


@triton.jit
def _slots(block_ids, keys, kv_head, num_kv_heads, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns where the cache of a KV head stores keys."""
    return (block_ids.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE


@triton.jit
def add_sink(acc, row_max, row_sum, sinks_ptr, heads, is_used):  # type: ignore[no-untyped-def]
    """Returns the state of `attend` with each row's sink, a score without a value, which counts once per row.

    The largest score may become that of the sink, so that the sum stays finite, and the state has a weight in a merge
    of chunks even if the row has seen no key in this one.
    """
    sinks = tl.load(sinks_ptr + heads, mask=is_used, other=0.0).to(tl.float32)[:, None] * LOG2_E
    new_max = tl.maximum(row_max, sinks)
    finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    correction = tl.exp2(row_max - finite_max)
    return acc * correction, new_max, row_sum * correction + tl.exp2(sinks - finite_max)


@triton.jit
def weighted_mean(acc, row_sum, IS_QUANTIZED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the result of the state of `attend`, [BLOCK_M, padded head size] fp32; zeros where it has seen no key."""
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    if IS_QUANTIZED:
        total *= _WEIGHT_SCALE
    return acc / total


@triton.jit
def _load_rows(  # type: ignore[no-untyped-def]
    ptr,
    slots,
    is_readable,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Loads [BLOCK_N, BLOCK_D] of a cache, with zeros where it is not readable and from WIDTH on."""
    columns = tl.arange(0, BLOCK_D)
    ptrs = ptr + slots[:, None] * HEAD_DIM + columns[None, :]
    if IS_MASKED and WIDTH < BLOCK_D:
        rows = tl.load(ptrs, mask=is_readable[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif IS_MASKED:
        rows = tl.load(ptrs, mask=is_readable[:, None], other=0.0)
    elif WIDTH < BLOCK_D:
        rows = tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        rows = tl.load(ptrs)
    return rows


@triton.jit
def _load_scales(ptr, slots, is_readable, IS_MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads [BLOCK_N] scales of a cache."""
    if IS_MASKED:
        scales = tl.load(ptr + slots, mask=is_readable, other=0.0)
    else:
        scales = tl.load(ptr + slots)
    return scales


@triton.jit
def dot(a, b, acc):  # type: ignore[no-untyped-def]
    """Returns acc + a @ b with fp32 sums. Triton's interpreter would multiply the bits of bfloat16 as integers."""
    if _IS_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
