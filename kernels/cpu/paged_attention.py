"""Causal attention of a ragged batch over a paged KV cache, reading the cache in place.

Work is cut into items: the query tokens of one row, QUERY_TILE at a time, with all query heads of one KV head, so that
each key and value is loaded once for the whole group. Items go to threads in runs of equal cost, fixed at the start:
dynamic scheduling costs more than it saves. What an item yields does not depend on the other rows of the batch.
"""

from typing import NamedTuple

import numba
import numpy as np
import torch

import kernels.cpu.threads  # noqa: F401 - chooses numba's threading layer
from kernels.cpu.arrays import Array, block_array, check_fp32, flat_rows, fp32
from kernels.cpu.jit import exp_nonpositive, inline, kernel, parallel_kernel, prefetch
from kernels.metadata import AttentionMetadata

QUERY_TILE = 8
"""Tokens per item. 4, 8 and 16 take the same time for 512 queries on 1024 keys (16 heads over 8, head_dim 128, one
thread of an EPYC 9005: 86 to 88 ms); small tiles leave more items to share out."""

PARALLEL_COST = 1 << 19
"""Multiply-adds of queries and keys from which waking the other threads, 20 to 50 us, pays."""

NO_WINDOW = 1 << 30

_LOWEST = np.float32(-3.0e38)  # finite: -inf - -inf would make NaN of rows that have not seen a key yet
_CACHE_LINE = 16  # fp32 values


class _Batch(NamedTuple):
    """The arguments of a call, in a form numba takes.

    Attributes:
        q, block_table: flat, with the step from row to row.
        items: [num_items, 3] row of the batch, first token, number of tokens.
        cost_before: [num_items + 1] cost of all items before each, for one KV head.
    """

    q: Array
    q_step: int
    k_cache: Array
    v_cache: Array
    query_start_loc: Array
    seq_lens: Array
    block_table: Array
    block_table_step: int
    out: Array
    scale: np.float32
    window: int
    items: Array
    cost_before: Array


@inline
def _prefetch_block(cache: Array, block: int, head: int) -> None:
    """Asks for one head's keys or values of a block, which lie in pieces where the hardware sees no stream to prefetch.

    32 sequences of 512 tokens, 8 KV heads, one thread of a busy EPYC 9005: 13.0 -> 10.9 ms with 16 heads of 128, 7.4 ->
    4.8 ms with 8 heads of 64.
    """
    for t in range(cache.shape[1]):
        for d in range(0, cache.shape[3], _CACHE_LINE):
            prefetch(cache, block, t, head, d)


@inline
def _compute_scores(
    q: Array, num_rows: int, k_cache: Array, block: int, num_keys: int, head: int, scores: Array
) -> None:
    """scores[i, t] = q[i] . key t of the block; four rows at a time share each load of a key."""
    head_dim, zero = q.shape[1], np.float32(0)
    num_quads = num_rows // 4 * 4
    for t in range(num_keys):
        for i in range(0, num_quads, 4):
            s0, s1, s2, s3 = zero, zero, zero, zero
            for d in range(head_dim):
                key = k_cache[block, t, head, d]
                s0 += q[i, d] * key
                s1 += q[i + 1, d] * key
                s2 += q[i + 2, d] * key
                s3 += q[i + 3, d] * key
            scores[i, t], scores[i + 1, t], scores[i + 2, t], scores[i + 3, t] = s0, s1, s2, s3
        for i in range(num_quads, num_rows):
            s0 = zero
            for d in range(head_dim):
                s0 += q[i, d] * k_cache[block, t, head, d]
            scores[i, t] = s0


@inline
def _softmax_step(scores: Array, state: Array, acc: Array) -> None:
    """Turns more scores of a row into weights relative to the largest score so far.

    state is that score and the sum of weights; it and acc are rescaled when a larger score turns up.
    """
    largest, total = state[0], np.float32(0)
    for t in range(scores.shape[0]):
        if scores[t] > largest:
            largest = scores[t]
    for t in range(scores.shape[0]):
        weight = exp_nonpositive(scores[t] - largest)
        scores[t] = weight
        total += weight
    if largest != state[0]:
        rescale = exp_nonpositive(state[0] - largest)
        for d in range(acc.shape[0]):
            acc[d] *= rescale
        state[1] *= rescale
        state[0] = largest
    state[1] += total


@inline
def _add_values(weights: Array, v_cache: Array, block: int, first: int, head: int, acc: Array) -> None:
    """Adds weights[t] * value first + t of the block to acc; four values per load and store of acc."""
    num_quads = weights.shape[0] // 4 * 4
    for t in range(0, num_quads, 4):
        w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for d in range(acc.shape[0]):
            acc[d] += (
                w0 * v_cache[block, first + t, head, d]
                + w1 * v_cache[block, first + t + 1, head, d]
                + w2 * v_cache[block, first + t + 2, head, d]
                + w3 * v_cache[block, first + t + 3, head, d]
            )
    for t in range(num_quads, weights.shape[0]):
        weight = weights[t]
        for d in range(acc.shape[0]):
            acc[d] += weight * v_cache[block, first + t, head, d]


@inline
def _attend(
    batch: _Batch, item: int, head: int, group_size: int, q: Array, scores: Array, states: Array, acc: Array
) -> None:
    """Online softmax (arXiv:2307.08691) over the blocks that the rows of an item can see.

    Row i is query head i % group_size of the group, of token i // group_size of the item.
    """
    row, first_token, num_tokens = batch.items[item, 0], batch.items[item, 1], batch.items[item, 2]
    num_rows = num_tokens * group_size
    for i in range(num_rows):
        start = (first_token + i // group_size) * batch.q_step + (head * group_size + i % group_size) * q.shape[1]
        source, target = batch.q[start : start + q.shape[1]], q[i]
        for d in range(q.shape[1]):
            target[d] = source[d] * batch.scale
        acc[i] = np.float32(0)
        states[i, 0], states[i, 1] = _LOWEST, np.float32(0)

    block_size = batch.k_cache.shape[1]
    first_position = batch.seq_lens[row] - (batch.query_start_loc[row + 1] - first_token)
    last_position = first_position + num_tokens - 1
    table = row * batch.block_table_step
    last_block = last_position // block_size
    for b in range(max(0, first_position + 1 - batch.window) // block_size, last_block + 1):
        block, next_block = batch.block_table[table + b], batch.block_table[table + min(b + 1, last_block)]
        num_keys = min(block_size, last_position + 1 - b * block_size)
        _prefetch_block(batch.k_cache, next_block, head)
        _compute_scores(q, num_rows, batch.k_cache, block, num_keys, head, scores)
        _prefetch_block(batch.v_cache, next_block, head)
        for i in range(num_rows):
            visible = first_position + i // group_size + 1 - b * block_size  # keys from here up to the row's own
            start, stop = max(0, visible - batch.window), min(num_keys, visible)
            if start < stop:
                weights = scores[i, start:stop]
                _softmax_step(weights, states[i], acc[i])
                _add_values(weights, batch.v_cache, block, start, head, acc[i])

    for i in range(num_rows):
        target = batch.out[first_token + i // group_size, head * group_size + i % group_size]
        source, factor = acc[i], np.float32(1) / states[i, 1]
        for d in range(q.shape[1]):
            target[d] = source[d] * factor


@kernel
def _attend_share(batch: _Batch, share: int, num_shares: int) -> None:
    """The items, by KV head, that begin inside one of `num_shares` equal shares of the cost."""
    block_size, num_kv_heads, head_dim = batch.k_cache.shape[1], batch.k_cache.shape[2], batch.k_cache.shape[3]
    group_size = batch.out.shape[1] // num_kv_heads
    max_rows = QUERY_TILE * group_size
    q, acc = np.empty((max_rows, head_dim), np.float32), np.empty((max_rows, head_dim), np.float32)
    scores, states = np.empty((max_rows, block_size), np.float32), np.empty((max_rows, 2), np.float32)
    total = batch.cost_before[-1] * num_kv_heads
    begin, end = total * share // num_shares, total * (share + 1) // num_shares
    for item in range(batch.items.shape[0]):
        cost_before = batch.cost_before[item] * num_kv_heads
        cost = batch.cost_before[item + 1] - batch.cost_before[item]
        for head in range(num_kv_heads):
            if begin <= cost_before + cost * head < end:
                _attend(batch, item, head, group_size, q, scores, states, acc)


@parallel_kernel
def _attend_parallel(batch: _Batch, num_shares: int) -> None:
    for share in numba.prange(num_shares):
        _attend_share(batch, share, num_shares)


@kernel
def _plan_items(query_start_loc: Array, seq_lens: Array, window: int, items: Array, cost_before: Array) -> int:
    """Fills `items` and `cost_before` of a `_Batch`; returns how many items there are."""
    count = 0
    cost_before[0] = 0
    for row in range(seq_lens.shape[0]):
        for first in range(query_start_loc[row], query_start_loc[row + 1], QUERY_TILE):
            num_tokens = min(QUERY_TILE, query_start_loc[row + 1] - first)
            num_keys = min(seq_lens[row] - (query_start_loc[row + 1] - first), window) + num_tokens
            items[count, 0], items[count, 1], items[count, 2] = row, first, num_tokens
            # the constant stands for loading keys and values, which takes as long for one query as for a few
            cost_before[count + 1] = cost_before[count] + num_keys * (num_tokens + 2)
            count += 1
    return count


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over a paged KV cache, prefill chunks and decodes alike.

    Args:
        q: [T, num_heads, head_dim] fp32; rows may be apart, as those of a slice of the fused QKV are.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] fp32, contiguous.
        metadata: the batch; slots past a row's seq_lens are never used.
        scale: softmax scale, usually head_dim ** -0.5.
        sliding_window: a token at position p sees keys max(0, p - sliding_window + 1)..p; None: 0..p.
    Returns: [T, num_heads, head_dim] fp32, contiguous.
    Raises: ValueError: not fp32, shapes disagree, or something that must be contiguous is not.
    """
    check_fp32(q=q, k_cache=k_cache, v_cache=v_cache)
    num_tokens, num_heads, head_dim = q.shape
    if num_heads % k_cache.shape[2] or k_cache.shape[3] != head_dim or k_cache.shape != v_cache.shape:
        raise ValueError(f"q {list(q.shape)} does not fit caches {list(k_cache.shape)} and {list(v_cache.shape)}")
    window = NO_WINDOW if sliding_window is None else sliding_window
    query_start_loc, seq_lens = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy()
    max_items = num_tokens // QUERY_TILE + metadata.num_reqs
    items, cost_before = np.empty((max_items, 3), np.int64), np.empty(max_items + 1, np.int64)
    num_items = _plan_items(query_start_loc, seq_lens, window, items, cost_before)
    out = torch.empty(q.shape, dtype=torch.float32)
    batch = _Batch(
        *flat_rows(q),
        block_array(k_cache, "k_cache"),
        block_array(v_cache, "v_cache"),
        query_start_loc,
        seq_lens,
        *flat_rows(metadata.block_table),
        out.numpy(),
        fp32(scale),
        window,
        items[:num_items],
        cost_before[: num_items + 1],
    )
    num_threads = numba.get_num_threads()
    if num_threads == 1 or cost_before[num_items] * num_heads * head_dim < PARALLEL_COST:
        _attend_share(batch, 0, 1)
    else:
        _attend_parallel(batch, num_threads)
    return out
