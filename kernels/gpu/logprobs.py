"""Log-probabilities of raw logits: of the chosen tokens, and of the best alternatives in order.

A row is summed in fp32 within pieces of some thousand logits and in fp64 over the pieces, with an error of about 1e-6.
Alternatives are found like the candidates of top_k; the rank of each is the number of candidates before it.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.candidates import gather_candidates
from kernels.gpu.launch import launch
from kernels.gpu.plan_rows import CANDIDATES, DONE, RowPlans, kth_key, store_candidate_plan
from kernels.gpu.sampling_tiles import SamplingTile
from kernels.gpu.scan import row_mass, scan_rows, unadjusted
from kernels.gpu.token_order import INF, NO_PLACE, key_logit, logit_key, place_id, place_key, place_of
from kernels.sampling import SampledTokens, SamplingBatch

_STEP = tl.constexpr(4)
"""Candidates compared with all others at a time: of 2048, 32 comparisons per thread."""

_LAST = tl.constexpr((1 << 62) - 1)
_ANY_KEY = tl.constexpr(-(1 << 31))


def write_logprobs(logits: torch.Tensor, batch: SamplingBatch, result: SampledTokens, *, tile: SamplingTile) -> None:
    """Fills in the log-probabilities of rows that ask for them and did not fail.

    Args:
        logits: [S, vocab_size] float32, raw.
        batch: number of alternatives of each row.
        result: has token_ids; gets logprobs, top_ids and top_values, which hold NaN and -1.
        tile: sizes.
    """
    num_rows, vocab_size = logits.shape
    rows = unadjusted(logits)
    scan = scan_rows(rows, batch, tile=tile, for_logprobs=True)
    num_tiles, num_chunks = scan.tile_max.shape[1], scan.chunk_max.shape[1]
    plans = RowPlans.empty(num_rows, num_tiles, logits.device)
    launch(
        _logprobs_kernel,
        (num_rows,),
        logits,
        *scan,
        batch.top_logprobs,
        result.token_ids,
        result.logprobs,
        plans.way,
        plans.cut_key,
        plans.mass,
        plans.num_candidates,
        plans.num_near,
        plans.near_tiles,
        vocab_size,
        num_tiles,
        num_chunks,
        TILES=triton.next_power_of_2(num_tiles),
        CHUNKS=triton.next_power_of_2(num_chunks),
        CAPACITY=tile.candidates,
        num_warps=tile.row_warps,
    )
    if batch.max_top_logprobs == 0:
        return
    launch(
        _alternatives_kernel,
        (num_rows,),
        logits,
        *gather_candidates(rows, plans, tile=tile),
        plans.way,
        plans.mass,
        plans.num_candidates,
        batch.top_logprobs,
        result.top_ids,
        result.top_values,
        vocab_size,
        result.top_ids.shape[1],
        ID_BITS=tile.id_bits,
        CAPACITY=tile.candidates,
        BLOCK=tile.search_block,
        num_warps=tile.row_warps,
    )


@triton.jit(
    do_not_specialize=["top_logprobs_ptr", "num_tiles", "num_chunks"]
)  # fmt: skip
def _logprobs_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    tile_max_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    top_logprobs_ptr,
    token_ids_ptr,
    logprobs_ptr,
    way_ptr,
    cut_key_ptr,
    log_sum_ptr,
    num_candidates_ptr,
    num_near_ptr,
    near_tiles_ptr,
    vocab_size,
    num_tiles,
    num_chunks,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0)
    way = tl.full([], DONE, tl.int32)
    num_top = tl.load(top_logprobs_ptr + row)
    token = tl.load(token_ids_ptr + row)
    if (num_top >= 0) & (token >= 0):
        tiles = tl.arange(0, TILES)
        maxima = tl.load(tile_max_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=-INF)
        top = tl.max(maxima, axis=0)
        log_sum = top.to(tl.float64) + tl.log(row_mass(chunk_max_ptr, chunk_sum_ptr, row, num_chunks, top, 1.0, CHUNKS))
        logit = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + token)
        tl.store(logprobs_ptr + row, logit.to(tl.float64) - log_sum)
        tl.store(log_sum_ptr + row, log_sum)
        if num_top > 0:
            way = tl.full([], CANDIDATES, tl.int32)
            cut = tl.full([], _ANY_KEY, tl.int32)
            if (vocab_size > CAPACITY) & (num_top <= num_tiles):
                cut = kth_key(logit_key(maxima), num_top)
            store_candidate_plan(
                cut_key_ptr, num_candidates_ptr, num_near_ptr, near_tiles_ptr, row, num_tiles, logit_key(maxima), cut,
                TILES,
            )  # fmt: skip
    tl.store(way_ptr + row, way)


@triton.jit(do_not_specialize=["top_logprobs_ptr", "width"])
def _alternatives_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    candidate_ids_ptr,
    candidate_logits_ptr,
    way_ptr,
    log_sum_ptr,
    num_candidates_ptr,
    top_logprobs_ptr,
    top_ids_ptr,
    top_values_ptr,
    vocab_size,
    width,
    ID_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(way_ptr + row) == CANDIDATES:
        num_candidates = tl.load(num_candidates_ptr + row)
        num_top = tl.minimum(tl.minimum(tl.load(top_logprobs_ptr + row), vocab_size), width)
        log_sum = tl.load(log_sum_ptr + row)
        out_ids_ptr = top_ids_ptr + row * width
        out_values_ptr = top_values_ptr + row * width
        if num_candidates <= CAPACITY:
            candidate_ids_ptr += row * CAPACITY
            candidate_logits_ptr += row * CAPACITY
            slots = tl.arange(0, CAPACITY)
            is_token = slots < num_candidates
            ids = tl.load(candidate_ids_ptr + slots, mask=is_token, other=0)
            logits = tl.load(candidate_logits_ptr + slots, mask=is_token, other=-INF)
            places = place_of(logit_key(logits), ids, ID_BITS)
            ranks = tl.zeros([CAPACITY], tl.int32)
            for start in range(0, num_candidates, _STEP):
                others = start + tl.arange(0, _STEP)
                is_other = others < num_candidates
                other_ids = tl.load(candidate_ids_ptr + others, mask=is_other, other=0)
                other_logits = tl.load(candidate_logits_ptr + others, mask=is_other, other=-INF)
                other_places = tl.where(is_other, place_of(logit_key(other_logits), other_ids, ID_BITS), NO_PLACE)
                ranks += tl.sum((other_places[None, :] > places[:, None]).to(tl.int32), axis=1)
            is_shown = is_token & (ranks < num_top)
            tl.store(out_ids_ptr + ranks, ids.to(tl.int64), mask=is_shown)
            tl.store(out_values_ptr + ranks, logits.to(tl.float64) - log_sum, mask=is_shown)
        else:
            row_ptr = logits_ptr + row.to(tl.int64) * vocab_size
            place = tl.full([], _LAST, tl.int64)
            for rank in range(num_top):
                place = _next_place(row_ptr, vocab_size, place, ID_BITS, BLOCK)
                tl.store(out_ids_ptr + rank, place_id(place, ID_BITS))
                tl.store(out_values_ptr + rank, key_logit(place_key(place, ID_BITS)).to(tl.float64) - log_sum)


@triton.jit
def _next_place(row_ptr, vocab_size, place, ID_BITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the place of the token right after a place."""
    best = tl.full([BLOCK], NO_PLACE, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_token = ids < vocab_size
        places = place_of(logit_key(tl.load(row_ptr + ids, mask=is_token, other=-INF)), ids, ID_BITS)
        best = tl.maximum(best, tl.where(is_token & (places < place), places, NO_PLACE))
    return tl.max(best, axis=0)
