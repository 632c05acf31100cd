"""Causal attention of a ragged batch over a paged KV cache, in place; prefill chunks and decodes alike.

The query heads that share a KV head are rows of one small matrix, token after token; an item is one KV head and up to
MAX_ROWS of these rows, so that each key and value is loaded once for all of them. It goes through the sequence 32 keys
at a time with an online softmax (arXiv:2307.08691). The bits of a row's result depend on its own query and keys alone:
the steps of 32 begin at the first token, whichever rows share the tile, and keys that a row must not see add zero.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kernels.cpu.arrays import check_fp32, check_integers
from kernels.cpu.instruction import FIRST_OPERAND, ROWS, SCRATCH_BYTES, Opcode, item_kernel, num_rows
from kernels.cpu.intrinsics import floats_at, longs_at, words_at
from kernels.cpu.jit import bits_float, inline, kernel
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.multiply_tile import add_values, score_keys
from kernels.cpu.recording import Recording
from kernels.cpu.soft_cap import cap_scores
from kernels.cpu.softmax_step import softmax_step
from kernels.cpu.tile import LANES, MAX_ROWS
from kernels.metadata import AttentionMetadata

if TYPE_CHECKING:
    from kernels.cpu.arrays import Ints, Longs

NO_WINDOW = 1 << 30
_STEP = 2 * LANES  # keys
_PLACES_BEHIND = 3  # the last step, and what it prefetches, may begin at the last group
_LOWEST = np.float32(-3.0e38)  # finite, because -inf - -inf would be NaN in rows that have not seen a key yet

_Q, _Q_STEP, _K, _V, _K_SCALES, _V_SCALES, _OUT, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, _WINDOW = range(
    FIRST_OPERAND, FIRST_OPERAND + 12
)
_PLAN, _QUERY_START, _SEQ_LENS, _TABLE, _TABLE_STEP, _GROUP_SIZE, _SOFT_CAP, _SINKS, _SIZE = range(
    FIRST_OPERAND + 12, FIRST_OPERAND + 21
)


def emit_plan(recording: Recording, metadata: AttentionMetadata, group_size: int) -> torch.Tensor:
    """Divides a batch into items, once for all layers: [1 + items, 3] int64, the number of items first.

    Args:
        recording: gets the instruction.
        metadata: the batch.
        group_size: query heads per KV head.
    Raises: ValueError: integers of another dtype.
    """
    check_integers(torch.int32, query_start_loc=metadata.query_start_loc, seq_lens=metadata.seq_lens)
    max_items = metadata.num_tokens * group_size // MAX_ROWS + metadata.num_reqs
    plan = torch.zeros(1 + max_items, 3, dtype=torch.int64)
    recording.keep((plan, metadata))
    operands = [0] * (_GROUP_SIZE + 1 - FIRST_OPERAND)
    operands[_PLAN - FIRST_OPERAND], operands[_GROUP_SIZE - FIRST_OPERAND] = plan.data_ptr(), group_size
    operands[_QUERY_START - FIRST_OPERAND] = metadata.query_start_loc.data_ptr()
    recording.emit(Opcode.PLAN_ATTENTION, metadata.seq_lens, *operands)
    return plan


def max_tokens(head_dim: int) -> int:
    """Returns the tokens of a row whose places in the cache fit into an item's memory."""
    padded_dim = -(-head_dim // _STEP) * _STEP
    used = 4 * (MAX_ROWS * (head_dim + padded_dim + _STEP) + _STEP) + 8 * MAX_ROWS  # see `_open_item`
    return LANES * ((SCRATCH_BYTES - used) // 8 - _PLACES_BEHIND)


def emit_paged_attention(
    recording: Recording,
    q: torch.Tensor,
    kv_cache: CpuKVCache,
    metadata: AttentionMetadata,
    plan: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See `kernels.interface.KernelOps.paged_attention`; sinks may be in any dtype, and are read now.

    Raises: ValueError: another dtype, sizes disagree, or heads that are not contiguous.
    """
    check_fp32(q=q)
    check_integers(torch.int32, block_table=metadata.block_table)
    _, num_heads, head_dim = q.shape
    if metadata.block_size != kv_cache.block_size:
        raise ValueError(f"block_size of the batch is {metadata.block_size}, of the cache {kv_cache.block_size}")
    num_tokens, most = metadata.block_table.shape[1] * kv_cache.block_size, max_tokens(head_dim)
    if num_tokens > most:
        raise ValueError(f"rows of {num_tokens} tokens are too long, at most {most} are supported")
    if num_heads % kv_cache.num_kv_heads or kv_cache.head_dim != head_dim or q.stride()[1:] != (head_dim, 1):
        raise ValueError(
            f"q {list(q.shape)} with strides {q.stride()} does not fit a cache of {kv_cache.num_kv_heads} heads of "
            f"{kv_cache.head_dim}"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks have shape {list(sinks.shape)}, there are {num_heads} heads")
    exact_sinks = None if sinks is None else sinks.float().contiguous()
    out = recording.empty(q, num_heads * head_dim)
    recording.emit(
        Opcode.PAGED_ATTENTION,
        q,
        q.data_ptr(),
        4 * q.stride(0),
        kv_cache.k.data_ptr(),
        kv_cache.v.data_ptr(),
        kv_cache.k_scales.data_ptr() if kv_cache.is_quantized else 0,
        kv_cache.v_scales.data_ptr() if kv_cache.is_quantized else 0,
        out.data_ptr(),
        num_heads,
        kv_cache.num_kv_heads,
        head_dim,
        kv_cache.block_size,
        NO_WINDOW if sliding_window is None else sliding_window,
        plan.data_ptr(),
        metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.block_table.data_ptr(),
        metadata.block_table.stride(0),
        num_heads // kv_cache.num_kv_heads,
        int(np.float32(soft_cap or 0.0).view(np.int32)),  # its bits
        0 if exact_sinks is None else exact_sinks.data_ptr(),
        kv_cache.k.element_size(),
        value=scale,
    )
    recording.keep((kv_cache, metadata, plan, exact_sinks))
    return out


@item_kernel
def plan_item(row: "Longs", _value: np.float32, _item: int, _scratch: int) -> None:
    """Fills a plan: request, first row, number of rows of each item."""
    num_reqs, group_size = num_rows(row[ROWS]), row[_GROUP_SIZE]
    query_start = words_at(row[_QUERY_START], num_reqs + 1)
    count = 0
    for request in range(num_reqs):
        rows = (query_start[request + 1] - query_start[request]) * group_size
        num_items = -(-rows // MAX_ROWS)
        plan = longs_at(row[_PLAN] + 24 * (1 + count), (num_items, 3))
        for i in range(num_items):
            begin = i * rows // num_items
            plan[i, 0], plan[i, 1], plan[i, 2] = request, begin, (i + 1) * rows // num_items - begin
        count += num_items
    longs_at(row[_PLAN], 1)[0] = count


@kernel
def num_attention_items(row: "Longs") -> int:
    """Returns the number of items: each KV head of those of the plan."""
    return int(longs_at(row[_PLAN], 1)[0] * row[_KV_HEADS])


class _Item(NamedTuple):
    """Sizes and addresses of one item: one KV head and some rows of one request.

    Attributes:
        request: of all rows.
        height, first, group_size, first_head, begin, first_position: the rows. With t = (first + i) // group_size, row
            i < height is query head first_head + (first + i) % group_size of token t of the request. This is token
            begin + t of the batch, at position first_position + t.
        num_groups: groups of 16 keys up to the last one seen by a row.
        places: address of the index of each group in the cache, int64; the last one is repeated three times.
        padded_dim: columns of acc, head_dim rounded up to 32.
        q: address of the scaled queries, [head_dim, height] fp32.
        zeros, scores: addresses of 32 zeros and of scores [height, 32], fp32.
        states: address of the largest score and the sum of weights of each row, [height, 2] fp32.
        acc: address of the weighted values, [height, padded_dim] fp32.
    """

    request: int
    height: int
    first: int
    group_size: int
    first_head: int
    begin: int
    first_position: int
    num_groups: int
    places: int
    head_dim: int
    padded_dim: int
    q: int
    zeros: int
    scores: int
    states: int
    acc: int


@inline
def _open_item(row: "Longs", item: int, scratch: int) -> _Item:
    head_dim, group_size = row[_HEAD_DIM], row[_GROUP_SIZE]
    head, plan = item % row[_KV_HEADS], longs_at(row[_PLAN] + 24 * (1 + item // row[_KV_HEADS]), 3)
    request, first, height = plan[0], plan[1], plan[2]
    begin, end = words_at(row[_QUERY_START] + 4 * request, 2)
    first_position = words_at(row[_SEQ_LENS] + 4 * request, 1)[0] - (end - begin)
    num_groups = (first_position + (first + height - 1) // group_size) // LANES + 1

    padded_dim = -(-head_dim // _STEP) * _STEP
    q = scratch
    zeros = q + 4 * MAX_ROWS * head_dim
    scores = zeros + 4 * _STEP
    states = scores + 4 * _STEP * MAX_ROWS
    acc = states + 8 * MAX_ROWS
    places = acc + 4 * padded_dim * MAX_ROWS
    return _Item(
        request, height, first, group_size, head * group_size, int(begin), first_position, num_groups, places, head_dim,
        padded_dim, q, zeros, scores, states, acc,
    )  # fmt: skip


@inline
def _find_places(row: "Longs", item: _Item, request_table: "Ints") -> None:
    """Fills `places` from the block table of the request."""
    groups, num_kv_heads, head = row[_BLOCK_SIZE] // LANES, row[_KV_HEADS], item.first_head // item.group_size
    places = longs_at(item.places, item.num_groups + _PLACES_BEHIND)
    group = 0
    for block in request_table[: -(-item.num_groups // groups)]:
        for i in range(min(groups, item.num_groups - group)):
            places[group] = (block * num_kv_heads + head) * groups + i
            group += 1
    places[group:] = places[group - 1]


@inline
def _load_queries(row: "Longs", item: _Item, scale: np.float32) -> None:
    """Lays the scaled queries out for `score_keys`, and initialises the sums; a sink is the first score seen."""
    q, acc = floats_at(item.q, (item.head_dim, item.height)), floats_at(item.acc, (item.height, item.padded_dim))
    states = floats_at(item.states, (item.height, 2))
    floats_at(item.zeros, _STEP)[:] = np.float32(0)
    for i in range(item.height):
        token, head = (item.first + i) // item.group_size, item.first_head + (item.first + i) % item.group_size
        address = row[_Q] + (item.begin + token) * row[_Q_STEP] + 4 * item.head_dim * head
        source = floats_at(address, item.head_dim)
        for d in range(item.head_dim):
            q[d, i] = source[d] * scale
        acc[i, :] = np.float32(0)
        if row[_SINKS] != 0:
            states[i, 0], states[i, 1] = floats_at(row[_SINKS], head + 1)[head], np.float32(1)
        else:
            states[i, 0], states[i, 1] = _LOWEST, np.float32(0)


@inline
def _store_output(row: "Longs", item: _Item) -> None:
    acc, states = floats_at(item.acc, (item.height, item.padded_dim)), floats_at(item.states, (item.height, 2))
    for i in range(item.height):
        token, head = (item.first + i) // item.group_size, item.first_head + (item.first + i) % item.group_size
        address = row[_OUT] + 4 * item.head_dim * ((item.begin + token) * row[_HEADS] + head)
        target = floats_at(address, item.head_dim)
        factor = np.float32(1) / states[i, 1]
        for d in range(item.head_dim):
            target[d] = acc[i, d] * factor


@inline
def _scale_columns(item: _Item, scales: int, place0: int, place1: int) -> None:
    """Multiplies each column of scores by the scale of its token."""
    scores = floats_at(item.scores, (item.height, _STEP))
    scales0, scales1 = floats_at(scales + 4 * LANES * place0, LANES), floats_at(scales + 4 * LANES * place1, LANES)
    for i in range(item.height):
        for t in range(LANES):
            scores[i, t] *= scales0[t]
            scores[i, LANES + t] *= scales1[t]


@inline
def _softmax(item: _Item, base: int, window: int) -> None:
    """Converts scores of the 32 keys from position `base` on to weights; keys that a row does not see get 0."""
    scores = floats_at(item.scores, (item.height, _STEP))
    step = 4 * item.padded_dim
    for i in range(item.height):
        position = item.first_position + (item.first + i) // item.group_size
        if base + _STEP - 1 > position or base <= position - window:
            first, last = position - window + 1 - base, position - base
            for t in range(_STEP):
                score = scores[i, t]
                scores[i, t] = score if first <= t and t <= last else np.float32(-np.inf)
        softmax_step(item.scores + 4 * _STEP * i, item.states + 8 * i, item.acc + step * i, step)


@inline
def _add_values(row: "Longs", item: _Item, place: int, following: int, weights: int, num_keys: int) -> None:
    """Adds the weighted values of a group to acc; prefetches those of the next group."""
    size = row[_SIZE]
    group_bytes = LANES * item.head_dim * size
    column = 0
    while column < item.padded_dim:
        wide = item.height <= MAX_ROWS // 2 and column + 2 * _STEP <= item.padded_dim
        add_values(
            size,
            item.height,
            wide,
            weights,
            row[_V] + place * group_bytes + column * size,
            item.head_dim,
            num_keys,
            item.acc + 4 * column,
            4 * item.padded_dim,
            row[_V] + following * group_bytes + column * size,
        )
        column += 2 * _STEP if wide else _STEP


@item_kernel
def attention_item(row: "Longs", scale: np.float32, number: int, scratch: int) -> None:
    """Computes attention of one KV head for some rows of one request."""
    item = _open_item(row, number, scratch)
    table_step = row[_TABLE_STEP]
    _find_places(row, item, words_at(row[_TABLE] + 4 * item.request * table_step, table_step))
    _load_queries(row, item, scale)

    size, has_scales, window = row[_SIZE], row[_K_SCALES] != 0, row[_WINDOW]
    group_bytes = LANES * item.head_dim * size
    places = longs_at(item.places, item.num_groups + _PLACES_BEHIND)
    highest = item.first_position + (item.first + item.height - 1) // item.group_size
    first_seen = max(0, item.first_position + item.first // item.group_size + 1 - window)
    for group in range(first_seen // _STEP * 2, item.num_groups, 2):
        place0, place1, next0, next1 = places[group], places[group + 1], places[group + 2], places[group + 3]
        k, ahead = row[_K] + place0 * group_bytes, row[_K] + next0 * group_bytes
        panel_step, ahead_step = (place1 - place0) * group_bytes, (next1 - next0) * group_bytes
        score_keys(size, item.height, item.q, k, panel_step, item.head_dim, item.zeros, item.scores, ahead, ahead_step)
        if has_scales:
            _scale_columns(item, row[_K_SCALES], place0, place1)
        if row[_SOFT_CAP] != 0:
            cap_scores(floats_at(item.scores, item.height * _STEP), bits_float(np.int32(row[_SOFT_CAP])))
        _softmax(item, LANES * group, window)
        if has_scales:
            _scale_columns(item, row[_V_SCALES], place0, place1)
        # Values past num_keys are undefined and must not be read, nor those of a group that no row sees.
        num_keys = highest + 1 - LANES * group
        if LANES * (group + 1) > first_seen:
            _add_values(row, item, place0, next0, item.scores, min(LANES, num_keys))
        if num_keys > LANES:
            _add_values(row, item, place1, next1, item.scores + 4 * LANES, min(LANES, num_keys - LANES))
    _store_output(row, item)
