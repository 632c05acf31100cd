"""Draws over the whole row: for rows without top_k and top_p, and for rows that the candidates did not decide.

A searched row finds its top_k cut by bisection over places, counting the row at each step. Its top_p cut is never
computed. The token with the best score among those that top_k and min_p keep is a draw from that distribution. It is in
the nucleus if the mass before it is below top_p of the whole, which takes one pass to check. If it is not, neither are
the tokens after it, and the best of those before it is checked next. The first token found in the nucleus has the best
score there, so it is the draw. With top_p = 0.9, nine rows in ten finish after one pass; the mean number of passes is
at most 1 + ln(1 / top_p).
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.draw_candidates import MASS_UNIT
from kernels.gpu.gumbel import best_of_chunk, exact_scores
from kernels.gpu.launch import launch
from kernels.gpu.philox import load_key
from kernels.gpu.plan_rows import ALL, SEARCH, RowPlans
from kernels.gpu.sampling_tiles import SamplingTile
from kernels.gpu.scan import LOG2_E, Logits
from kernels.gpu.token_order import INF, first_place, last_place, logit_key, place_of, row_pointer
from kernels.sampling import SampledTokens, SamplingBatch


def draw_all(
    logits: Logits, plans: RowPlans, batch: SamplingBatch, result: SampledTokens, *, tile: SamplingTile
) -> None:
    """Draws the tokens of rows whose way is ALL or SEARCH.

    Args:
        logits: logits of the rows.
        plans: of the rows.
        batch: sampling parameters.
        result: gets token_ids.
        tile: sizes.
    """
    num_rows, vocab_size = logits.raw.shape
    num_chunks = triton.cdiv(vocab_size, tile.draw_chunk)
    best = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.raw.device)
    launch(
        _best_of_chunks_kernel,
        tile.shared_rows(num_rows, num_chunks),
        *logits.tensors,
        plans.way,
        plans.top,
        plans.floor_key,
        batch.temperature,
        batch.seed,
        batch.position,
        best,
        vocab_size,
        num_chunks,
        HAS_ADJUSTED=logits.any_adjusted,
        ID_BITS=tile.id_bits,
        CHUNK=tile.draw_chunk,
        LANES=tile.draw_lanes,
        num_warps=tile.draw_warps,
    )
    launch(
        _draw_kernel,
        (num_rows,),
        *logits.tensors,
        plans.way,
        plans.top,
        plans.floor_key,
        plans.cut_key,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.seed,
        batch.position,
        best,
        result.token_ids,
        vocab_size,
        num_chunks,
        HAS_ADJUSTED=logits.any_adjusted,
        ID_BITS=tile.id_bits,
        CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=tile.draw_chunk,
        LANES=tile.draw_lanes,
        BLOCK=tile.search_block,
        num_warps=tile.row_warps,
    )


@triton.jit(
    do_not_specialize=["temperature_ptr", "seed_ptr", "position_ptr", "num_chunks"]
)  # fmt: skip
def _best_of_chunks_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    adjusted_ptr,
    is_adjusted_ptr,
    way_ptr,
    top_ptr,
    floor_key_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    vocab_size,
    num_chunks,
    HAS_ADJUSTED: tl.constexpr,
    ID_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(way_ptr + row) == ALL:
        row_ptr = row_pointer(raw_ptr, adjusted_ptr, is_adjusted_ptr, row, vocab_size, HAS_ADJUSTED)
        top = tl.load(top_ptr + row)
        temperature = tl.load(temperature_ptr + row)
        position, k0, k1 = load_key(seed_ptr, position_ptr, row)
        lowest = last_place(tl.load(floor_key_ptr + row), ID_BITS)
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            token = best_of_chunk(
                row_ptr, chunk * CHUNK, vocab_size, lowest, top, temperature, position, k0, k1, ID_BITS, CHUNK, LANES
            )
            tl.store(best_ptr + row * num_chunks + chunk, token)


@triton.jit
def _best_of_row(  # type: ignore[no-untyped-def]
    row_ptr, vocab_size, lowest, top, temperature, position, k0, k1,
    ID_BITS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns the token with the best score among those whose place is at least `lowest`; there must be one."""
    best = tl.full([], -INF, tl.float64)
    best_id = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, CHUNK):
        token = best_of_chunk(
            row_ptr, start, vocab_size, lowest, top, temperature, position, k0, k1, ID_BITS, CHUNK, LANES
        )
        if token >= 0:
            score = exact_scores(tl.load(row_ptr + token), token, top, temperature, position, k0, k1)
            best_id = tl.where(score > best, token, best_id)
            best = tl.maximum(score, best)
    return best_id


@triton.jit
def _count_from(row_ptr, vocab_size, lowest, ID_BITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts the tokens whose place is at least `lowest`."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-INF)
        counts += ((ids < vocab_size) & (place_of(logit_key(logits), ids, ID_BITS) >= lowest)).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def _masses(  # type: ignore[no-untyped-def]
    row_ptr, vocab_size, lowest, place, top, temperature, ID_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the mass of tokens before a place, and of all from `lowest` on, in units of 1 / MASS_UNIT."""
    scale = (1.0 / tl.maximum(temperature, 1e-30) * LOG2_E).to(tl.float32)
    before = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-INF)
        places = place_of(logit_key(logits), ids, ID_BITS)
        masses = (tl.exp2((logits - top) * scale) * MASS_UNIT).to(tl.int64)
        total += tl.where(places >= lowest, masses, 0)
        before += tl.where(places > place, masses, 0)
    return tl.sum(before, axis=0), tl.sum(total, axis=0)


@triton.jit(
    do_not_specialize=["temperature_ptr", "top_k_ptr", "top_p_ptr", "seed_ptr", "position_ptr", "num_chunks"]
)  # fmt: skip
def _draw_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    adjusted_ptr,
    is_adjusted_ptr,
    way_ptr,
    top_ptr,
    floor_key_ptr,
    cut_key_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    token_ids_ptr,
    vocab_size,
    num_chunks,
    HAS_ADJUSTED: tl.constexpr,
    ID_BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    way = tl.load(way_ptr + row)
    if (way == ALL) | (way == SEARCH):
        row_ptr = row_pointer(raw_ptr, adjusted_ptr, is_adjusted_ptr, row, vocab_size, HAS_ADJUSTED)
        top = tl.load(top_ptr + row)
        temperature = tl.load(temperature_ptr + row)
        position, k0, k1 = load_key(seed_ptr, position_ptr, row)
        token = tl.full([], 0, tl.int32)
        if way == ALL:
            chunks = tl.arange(0, CHUNKS)
            ids = tl.load(best_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=-1)
            logits = tl.load(row_ptr + ids, mask=ids >= 0, other=-INF)
            scores = exact_scores(logits, ids, top, temperature, position, k0, k1)
            token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, vocab_size), axis=0)
        else:
            lowest = last_place(tl.load(floor_key_ptr + row), ID_BITS)
            top_k = tl.load(top_k_ptr + row)
            if (top_k > 0) & (top_k < vocab_size):
                # At least top_k tokens reach the cut of the candidates, or it is the cut of min_p.
                low = last_place(tl.load(cut_key_ptr + row), ID_BITS)
                high = first_place(logit_key(top), ID_BITS)
                while high - low > 1:
                    middle = low + (high - low) // 2
                    count = _count_from(row_ptr, vocab_size, middle, ID_BITS, BLOCK)
                    low = tl.where(count >= top_k, middle, low)
                    high = tl.where(count >= top_k, high, middle)
                    high = tl.where(count == top_k, middle + 1, high)
                lowest = low
            token = _best_of_row(row_ptr, vocab_size, lowest, top, temperature, position, k0, k1, ID_BITS, CHUNK, LANES)
            top_p = tl.load(top_p_ptr + row)
            is_open = top_p < 1.0
            while is_open:
                place = place_of(logit_key(tl.load(row_ptr + token)), token, ID_BITS)
                before, total = _masses(row_ptr, vocab_size, lowest, place, top, temperature, ID_BITS, BLOCK)
                is_open = (before > 0) & (before.to(tl.float64) >= top_p * total.to(tl.float64))
                if is_open:
                    token = _best_of_row(
                        row_ptr, vocab_size, place + 1, top, temperature, position, k0, k1, ID_BITS, CHUNK, LANES
                    )
        tl.store(token_ids_ptr + row, token.to(tl.int64))
