"""The tokens whose logits reach a row's cut, collected from the tiles that have any."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.plan_rows import CANDIDATES, RowPlans
from kernels.gpu.sampling_tiles import SamplingTile
from kernels.gpu.scan import Logits
from kernels.gpu.token_order import INF, logit_key, row_pointer


class Candidates(NamedTuple):
    """Tokens of S rows in no particular order; `RowPlans.num_candidates` has their number.

    Attributes:
        ids, logits: [S, capacity] int32 and float32; tokens beyond the capacity are only counted.
    """

    ids: torch.Tensor
    logits: torch.Tensor


def gather_candidates(logits: Logits, plans: RowPlans, *, tile: SamplingTile) -> Candidates:
    """Collects the candidates of rows whose way is CANDIDATES and counts them in `plans.num_candidates`.

    Their order depends on the order of the programs and differs from run to run; results do not depend on it.

    Args:
        logits: logits of the rows.
        plans: of the rows.
        tile: sizes.
    """
    num_rows, vocab_size = logits.raw.shape
    ids = torch.empty((num_rows, tile.candidates), dtype=torch.int32, device=logits.raw.device)
    candidates = Candidates(ids, torch.empty_like(ids, dtype=torch.float32))
    launch(
        _gather_kernel,
        (num_rows, triton.cdiv(vocab_size, tile.chunk)),
        *logits.tensors,
        plans.way,
        plans.cut_key,
        plans.num_candidates,
        plans.num_near,
        plans.near_tiles,
        *candidates,
        vocab_size,
        plans.near_tiles.shape[1],
        HAS_ADJUSTED=logits.any_adjusted,
        TILE=tile.tile,
        CHUNK=tile.chunk,
        CAPACITY=tile.candidates,
        num_warps=tile.row_warps,
    )
    return candidates


@triton.jit(do_not_specialize=["num_tiles"])
def _gather_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    adjusted_ptr,
    is_adjusted_ptr,
    way_ptr,
    cut_key_ptr,
    num_candidates_ptr,
    num_near_ptr,
    near_tiles_ptr,
    ids_ptr,
    logits_ptr,
    vocab_size,
    num_tiles,
    HAS_ADJUSTED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Gathers the candidates of CHUNK logits of one row, from the tiles that reach its cut."""
    row = tl.program_id(0)
    if tl.load(way_ptr + row) == CANDIDATES:
        num_near = tl.load(num_near_ptr + row)
        first = tl.program_id(1) * (CHUNK // TILE)
        if first < num_near:
            near = first + tl.arange(0, CHUNK // TILE)
            tiles = tl.load(near_tiles_ptr + row * num_tiles + near, mask=near < num_near, other=0)
            row_ptr = row_pointer(raw_ptr, adjusted_ptr, is_adjusted_ptr, row, vocab_size, HAS_ADJUSTED)
            ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
            is_read = (near < num_near)[:, None] & (ids < vocab_size)
            logits = tl.load(row_ptr + ids, mask=is_read, other=-INF)
            is_found = is_read & (logit_key(logits) >= tl.load(cut_key_ptr + row))
            found = is_found.to(tl.int32)
            counts = tl.sum(found, axis=1)
            start = tl.atomic_add(num_candidates_ptr + row, tl.sum(counts, axis=0))
            slots = start + (tl.cumsum(counts, axis=0) - counts)[:, None] + tl.cumsum(found, axis=1) - 1
            is_stored = is_found & (slots < CAPACITY)
            tl.store(ids_ptr + row * CAPACITY + slots, ids, mask=is_stored)
            tl.store(logits_ptr + row * CAPACITY + slots, logits, mask=is_stored)
