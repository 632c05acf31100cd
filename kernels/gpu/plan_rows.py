"""Decides how each row is finished, from its scan alone: failures, greedy and forced rows end here.

A row that draws goes one of three ways. Without top_k and top_p every token that min_p leaves is scored (ALL). With
them, the k-th largest of the tiles' largest logits is a bound that at least k tokens reach, and seldom many more. The
tokens above it are gathered and the draw is decided among them (CANDIDATES). If they are too many or too few, the row
is read again until it is decided (SEARCH): very large top_k, nearly flat rows, or the largest logits all in a few
tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.sampling_tiles import SamplingTile
from kernels.gpu.scan import Logits, Scan, row_mass
from kernels.gpu.token_order import INF, LOWEST_KEY, key_logit, logit_key, row_pointer
from kernels.sampling import RowStatus, SampledTokens, SamplingBatch

DONE = tl.constexpr(0)
ALL = tl.constexpr(1)
CANDIDATES = tl.constexpr(2)
SEARCH = tl.constexpr(3)

_BAD_LOGITS = tl.constexpr(int(RowStatus.BAD_LOGITS))
_NO_CANDIDATE = tl.constexpr(int(RowStatus.NO_CANDIDATE))


class RowPlans(NamedTuple):
    """How S rows are finished.

    Attributes:
        way: [S] int32, DONE, ALL, CANDIDATES or SEARCH.
        top: [S] float32, largest logit.
        floor_key: [S] int32, the lowest key that min_p leaves; never that of -inf.
        cut_key: [S] int32, candidates are the tokens whose keys reach it.
        mass: [S] float64, sum of exp((logit - top) / temperature) over the row; -1 where the candidates themselves have
            all of it.
        num_candidates: [S] int32, initially zero.
        num_near, near_tiles: [S] and [S, num_tiles] int32, the tiles whose largest logit reaches the cut, in order.
    """

    way: torch.Tensor
    top: torch.Tensor
    floor_key: torch.Tensor
    cut_key: torch.Tensor
    mass: torch.Tensor
    num_candidates: torch.Tensor
    num_near: torch.Tensor
    near_tiles: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, num_tiles: int, device: torch.device) -> "RowPlans":
        """Allocates S plans."""

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(num_rows, dtype=dtype, device=device)

        return cls(
            way=column(torch.int32),
            top=column(torch.float32),
            floor_key=column(torch.int32),
            cut_key=column(torch.int32),
            mass=column(torch.float64),
            num_candidates=column(torch.int32),
            num_near=column(torch.int32),
            near_tiles=torch.empty((num_rows, num_tiles), dtype=torch.int32, device=device),
        )


def plan_rows(
    logits: Logits, scan: Scan, batch: SamplingBatch, result: SampledTokens, *, tile: SamplingTile
) -> RowPlans:
    """Writes the status of every row and the tokens of greedy and forced rows; returns the plans of the others.

    Args:
        logits: logits of the rows.
        scan: of these logits.
        batch: sampling parameters.
        result: gets status, and token_ids, -1 where undecided or failed.
        tile: sizes.
    """
    num_rows, vocab_size = logits.raw.shape
    num_tiles, num_chunks = scan.tile_max.shape[1], scan.chunk_max.shape[1]
    plans = RowPlans.empty(num_rows, num_tiles, logits.raw.device)
    launch(
        _plan_rows_kernel,
        (num_rows,),
        *logits.tensors,
        *scan,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.top_k if batch.forced_ids is None else batch.forced_ids,
        result.token_ids,
        result.status,
        *plans,
        vocab_size,
        num_tiles,
        num_chunks,
        ANY_RANDOM=batch.any_random,
        HAS_ADJUSTED=logits.any_adjusted,
        HAS_FORCED=batch.forced_ids is not None,
        TILE=tile.tile,
        TILES=triton.next_power_of_2(num_tiles),
        CHUNKS=triton.next_power_of_2(num_chunks),
        CAPACITY=tile.candidates,
        num_warps=tile.row_warps,
    )
    return plans


@triton.jit
def kth_key(keys, k):  # type: ignore[no-untyped-def]
    """Returns the largest key that at least k of these [n] keys reach; the smallest key if there are fewer than k."""
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
        high = tl.where(count == k, middle + 1, high)  # no key lies between this and the k-th
    return low.to(tl.int32)


@triton.jit
def store_candidate_plan(  # type: ignore[no-untyped-def]
    cut_key_ptr, num_candidates_ptr, num_near_ptr, near_tiles_ptr, row, num_tiles, keys, cut, TILES: tl.constexpr
):
    """Stores a row's cut and the tiles with logits that reach it; sets the number of candidates to zero.

    Args:
        keys: [TILES] of the tiles' largest logits.
        cut: key.
    """
    tiles = tl.arange(0, TILES)
    is_near = (tiles < num_tiles) & (keys >= cut)
    near = is_near.to(tl.int32)
    tl.store(near_tiles_ptr + row * num_tiles + tl.cumsum(near, axis=0) - 1, tiles, mask=is_near)
    tl.store(num_near_ptr + row, tl.sum(near, axis=0))
    tl.store(cut_key_ptr + row, cut)
    tl.store(num_candidates_ptr + row, tl.full([], 0, tl.int32))


@triton.jit
def _min_p_key(top, temperature, min_p):  # type: ignore[no-untyped-def]
    """Returns the lowest key of a finite logit with (logit - top) / temperature >= log(min_p), exact in fp64."""
    floor = tl.full([], LOWEST_KEY, tl.int32)
    if min_p > 0.0:
        least = tl.log(min_p)
        peak = top.to(tl.float64)
        guess = tl.maximum(peak + temperature * least, -3.0e38).to(tl.float32)
        # The rule is monotone in the logit, and the guess is at most one float away from the threshold.
        keys = tl.maximum(logit_key(guess) - 8 + tl.arange(0, 16), LOWEST_KEY)
        is_kept = (key_logit(keys).to(tl.float64) - peak) / temperature >= least
        floor = tl.min(tl.where(is_kept, keys, logit_key(top)), axis=0)
    return floor


@triton.jit(
    do_not_specialize=[
        "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "forced_ids_ptr", "num_tiles", "num_chunks"
    ]
)  # fmt: skip
def _plan_rows_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    adjusted_ptr,
    is_adjusted_ptr,
    tile_max_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    forced_ids_ptr,
    token_ids_ptr,
    status_ptr,
    way_ptr,
    top_ptr,
    floor_key_ptr,
    cut_key_ptr,
    mass_ptr,
    num_candidates_ptr,
    num_near_ptr,
    near_tiles_ptr,
    vocab_size,
    num_tiles,
    num_chunks,
    ANY_RANDOM: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Plans one row per program; parameters are those of `plan_rows`."""
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    maxima = tl.load(tile_max_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=-INF)
    top = tl.max(maxima, axis=0)
    is_ok = (top < INF) & (top > -INF)
    status = tl.where(is_ok, 0, tl.where(top == INF, _BAD_LOGITS, _NO_CANDIDATE))
    tl.store(status_ptr + row, status.to(tl.int8))

    first_tile = tl.min(tl.where(maxima == top, tiles, TILES - 1), axis=0)
    ids = first_tile * TILE + tl.arange(0, TILE)
    row_ptr = row_pointer(raw_ptr, adjusted_ptr, is_adjusted_ptr, row, vocab_size, HAS_ADJUSTED)
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-INF)
    token = tl.min(tl.where(logits == top, ids, vocab_size), axis=0)
    is_drawn = is_ok
    if HAS_FORCED:
        forced = tl.load(forced_ids_ptr + row)
        token = tl.where(forced >= 0, forced, token)
        is_drawn = is_ok & (forced < 0)
    tl.store(token_ids_ptr + row, tl.where(is_ok, token, -1).to(tl.int64))

    if ANY_RANDOM:
        way = tl.full([], DONE, tl.int32)
        temperature = tl.load(temperature_ptr + row)
        if is_drawn & (temperature > 0.0):
            tl.store(token_ids_ptr + row, tl.full([], -1, tl.int64))
            top_k = tl.load(top_k_ptr + row)
            top_p = tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            has_top_k = (top_k > 0) & (top_k < vocab_size)
            floor = _min_p_key(top, temperature, min_p)
            mass = tl.full([], -1.0, tl.float64)
            way = tl.where(has_top_k | (top_p < 1.0), CANDIDATES, ALL)
            if way == CANDIDATES:
                cut = floor
                if (vocab_size > CAPACITY) & (has_top_k | (min_p <= 0.0)):
                    rank = tl.where(has_top_k, top_k, tl.minimum(num_tiles // 2, CAPACITY // 2))
                    if rank <= num_tiles:
                        cut = tl.maximum(floor, kth_key(logit_key(maxima), rank))
                    if has_top_k == 0:
                        mass = row_mass(chunk_max_ptr, chunk_sum_ptr, row, num_chunks, top, temperature, CHUNKS)
                store_candidate_plan(
                    cut_key_ptr, num_candidates_ptr, num_near_ptr, near_tiles_ptr, row, num_tiles, logit_key(maxima),
                    cut, TILES,
                )  # fmt: skip
            tl.store(top_ptr + row, top)
            tl.store(floor_key_ptr + row, floor)
            tl.store(mass_ptr + row, mass)
        tl.store(way_ptr + row, way)
