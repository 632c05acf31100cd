"""Filters and draws among the gathered candidates of a row, all in the registers of one program.

Masses are integers, so that their sums do not depend on the order of the candidates, which is not fixed.
"""

import triton
import triton.language as tl

from kernels.gpu.candidates import Candidates
from kernels.gpu.gumbel import exact_scores
from kernels.gpu.launch import launch
from kernels.gpu.philox import load_key
from kernels.gpu.plan_rows import CANDIDATES, DONE, SEARCH, RowPlans
from kernels.gpu.sampling_tiles import SamplingTile
from kernels.gpu.token_order import INF, NO_PLACE, logit_key, place_of
from kernels.sampling import SampledTokens, SamplingBatch

MASS_UNIT = tl.constexpr(float(1 << 43))
"""Mass of the largest logit. The sum of 2^19 such tokens fits into 63 bits; masses below 6e-14 of it become 0."""


def draw_candidates(
    plans: RowPlans,
    candidates: Candidates,
    batch: SamplingBatch,
    result: SampledTokens,
    vocab_size: int,
    *,
    tile: SamplingTile,
) -> None:
    """Writes the tokens of rows that their candidates decide, and marks the other rows for the search.

    Args:
        plans, candidates: of the rows; `plans.way` is changed.
        batch: sampling parameters.
        result: gets token_ids.
        vocab_size: of the model.
        tile: sizes.
    """
    launch(
        _draw_candidates_kernel,
        (len(plans.way),),
        *candidates,
        plans.way,
        plans.top,
        plans.mass,
        plans.num_candidates,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.seed,
        batch.position,
        result.token_ids,
        vocab_size,
        ID_BITS=tile.id_bits,
        CAPACITY=tile.candidates,
        num_warps=tile.row_warps,
    )


@triton.jit
def last_kept_place(places, weights, target):  # type: ignore[no-untyped-def]
    """Returns the lowest kept place if a token is kept while the weight before it is below the target.

    Args:
        places, weights: [n] int64, NO_PLACE and 0 where there is no token.
        target: int64; if all weights together stay below it, every token is kept.
    """
    high = tl.max(places, axis=0) + 1
    low = tl.min(tl.where(places > NO_PLACE, places, high), axis=0)
    while high - low > 1:
        middle = low + (high - low) // 2
        weight = tl.sum(tl.where(places >= middle, weights, 0), axis=0)
        low = tl.where(weight >= target, middle, low)
        high = tl.where(weight >= target, high, middle)
        high = tl.where(weight == target, middle + 1, high)  # nothing with weight lies in between
    return low


@triton.jit(
    do_not_specialize=["temperature_ptr", "top_k_ptr", "top_p_ptr", "seed_ptr", "position_ptr"]
)  # fmt: skip
def _draw_candidates_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    logits_ptr,
    way_ptr,
    top_ptr,
    mass_ptr,
    num_candidates_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    position_ptr,
    token_ids_ptr,
    vocab_size,
    ID_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Filters and draws one row per program, if all of its candidates were gathered."""
    row = tl.program_id(0)
    if tl.load(way_ptr + row) == CANDIDATES:
        num_candidates = tl.load(num_candidates_ptr + row)
        is_decided = num_candidates <= CAPACITY
        if is_decided:
            slots = tl.arange(0, CAPACITY)
            is_kept = slots < num_candidates
            ids = tl.load(ids_ptr + row * CAPACITY + slots, mask=is_kept, other=0)
            logits = tl.load(logits_ptr + row * CAPACITY + slots, mask=is_kept, other=-INF)
            top = tl.load(top_ptr + row)
            temperature = tl.load(temperature_ptr + row)
            places = tl.where(is_kept, place_of(logit_key(logits), ids, ID_BITS), NO_PLACE)
            top_k = tl.load(top_k_ptr + row)
            if (top_k > 0) & (top_k < vocab_size):
                is_kept = is_kept & (places >= last_kept_place(places, is_kept.to(tl.int64), top_k.to(tl.int64)))
                places = tl.where(is_kept, places, NO_PLACE)
            top_p = tl.load(top_p_ptr + row)
            if top_p < 1.0:
                d = (logits.to(tl.float64) - top.to(tl.float64)) / temperature
                weights = (tl.exp(tl.where(is_kept, d, -INF)) * MASS_UNIT + 0.5).to(tl.int64)
                gathered = tl.sum(weights, axis=0)
                mass = tl.load(mass_ptr + row)
                is_whole = mass < 0.0
                mass = tl.where(is_whole, gathered.to(tl.float64), mass * MASS_UNIT)
                target = tl.maximum(tl.ceil(top_p * mass).to(tl.int64), 1)
                is_kept = is_kept & (places >= last_kept_place(places, weights, target))
                is_decided = is_whole | (gathered >= target)
            position, k0, k1 = load_key(seed_ptr, position_ptr, row)
            scores = exact_scores(logits, ids, top, temperature, position, k0, k1)
            scores = tl.where(is_kept, scores, -INF)
            token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, vocab_size), axis=0)
            tl.store(token_ids_ptr + row, token.to(tl.int64))
        tl.store(way_ptr + row, tl.where(is_decided, DONE, SEARCH))
