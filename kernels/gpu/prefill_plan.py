"""Divides the keys of prompt chunks among programs: the work list of `prefill_attention`.

A tile of queries is one program if the tiles of the step fill the device. A few tokens behind a long prefix are few
tiles with many keys, so their keys are divided into chunks. A kernel decides this from the rows on the device, once per
step for all layers. The host skips the division where sizes alone rule it out, as for steps full of whole prompts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.metadata import AttentionMetadata

CHUNK_UNIT = 512
"""Chunks are multiples of this number of keys. Eight steps of most tiles of 128 queries read four times the bytes that
their partial result writes."""

MAX_CHUNKS_PER_TILE = 256
"""Keeps the merge of a tile, which takes its chunks in sequence, shorter than its attention."""

_ROUNDS = 4
"""Chunks for each multiprocessor; one program occupies it. The busiest then has at most a quarter more keys than the
mean, if all tiles are divided."""

ROWS_AT_ONCE = 1024
"""Rows whose first programs are loaded at once when a program searches for its own: one load for most batches, where a
binary search would wait for several loads in sequence."""


class PrefillPlan(NamedTuple):
    """Programs of the rows of a step, and memory for partial results; all layers share it.

    Attributes:
        rows: [5, num_rows + 1] int32, not written if max_divided_tiles is 0. Of each row: its first program, the chunks
            of each of its tiles, the units of keys in a chunk, its first partial result, and its first tile that has
            several chunks. Programs, partial results and such tiles are numbered row by row; the last column holds
            their totals.
        parts: [P, num_kv_heads, block_m, head_dim] float32; the chunks of a tile follow each other.
        part_lse: [P, num_kv_heads, block_m] float32: logarithms (base 2) of the sums of the weights.
        max_programs: no batch of these sizes has more programs per KV head.
        max_divided_tiles: nor more tiles with several chunks; 0: each tile is one program.
    """

    rows: torch.Tensor
    parts: torch.Tensor
    part_lse: torch.Tensor
    max_programs: int
    max_divided_tiles: int


def prefill_plan(
    metadata: AttentionMetadata,
    *,
    first_row: int,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    block_m: int,
    tokens_per_tile: int,
    sliding_window: int | None,
    num_processors: int,
    may_divide: bool = True,
) -> PrefillPlan:
    """Returns the plan of the rows from first_row on; launches its kernel once per step, if tiles may be divided.

    Args:
        metadata: the batch; keeps the plan for the other layers of the step.
        first_row: rows before it have one query token each.
        num_tokens: query tokens from that row on, with those of padding.
        num_kv_heads, head_dim: as of the cache.
        block_m, tokens_per_tile: rows of queries and query tokens of a tile.
        sliding_window: keys before the window of a tile are in no chunk.
        num_processors: multiprocessors of the device.
        may_divide: False: every tile is one program.
    """
    sizes = (first_row, num_tokens, num_kv_heads, head_dim, block_m, tokens_per_tile)
    key = (prefill_plan, sizes, sliding_window, num_processors, may_divide)
    plan: PrefillPlan | None = metadata.derived.get(key)
    if plan is None:
        num_rows = metadata.num_reqs - first_row
        max_tiles = num_tokens // tokens_per_tile + num_rows
        max_splits = triton.cdiv(_ROUNDS * num_processors, num_kv_heads)
        max_divided_tiles = min(max_tiles, max_splits)
        # Allocated even if nothing is divided, so that the largest step, which is measured at start, contains it.
        shape = (max_splits + max_divided_tiles if may_divide else 0, num_kv_heads, block_m)
        device = metadata.seq_lens.device
        rows = torch.empty((5, num_rows + 1), dtype=torch.int32, device=device)
        if not may_divide or _fills_device(
            num_tokens, num_rows, metadata.max_seq_len, tokens_per_tile, sliding_window, max_splits
        ):
            max_splits = max_divided_tiles = 0
        plan = metadata.derived[key] = PrefillPlan(
            rows=rows,
            parts=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            part_lse=torch.empty(shape, dtype=torch.float32, device=device),
            max_programs=max_tiles + max_splits,
            max_divided_tiles=max_divided_tiles,
        )
        if max_divided_tiles == 0:
            return plan
        launch(
            _prefill_plan_kernel,
            (1,),
            plan.rows,
            metadata.query_start_loc,
            metadata.seq_lens,
            first_row,
            num_rows,
            tokens_per_tile,
            sliding_window or 0,
            max_splits,
            CHUNK_UNIT=CHUNK_UNIT,
            MAX_CHUNKS=MAX_CHUNKS_PER_TILE,
            ROWS_AT_ONCE=ROWS_AT_ONCE,
            num_warps=4,
        )
    return plan


def _fills_device(
    num_tokens: int,
    num_rows: int,
    max_seq_len: int,
    tokens_per_tile: int,
    sliding_window: int | None,
    max_splits: int,
) -> bool:
    """Tells from sizes alone that no tile will be divided, because the keys of all tiles are many times the longest.

    By the Cauchy-Schwarz inequality rows of num_tokens in all have at least num_tokens ** 2 / num_rows pairs of a
    query and a key. Windows and padding make it an estimate: the kernel of the plan then divides nothing.
    """
    longest, mean_row = max_seq_len, num_tokens / num_rows
    if sliding_window is not None:
        longest = min(longest, sliding_window + tokens_per_tile)
        mean_row = min(mean_row, sliding_window)
    return longest <= CHUNK_UNIT or longest * max_splits <= num_tokens * mean_row / tokens_per_tile


@triton.jit(
    do_not_specialize=[
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "first_row",
        "num_rows",
        "tokens_per_tile",
        "sliding_window",
        "max_splits",
    ]
)
def _prefill_plan_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    first_row,
    num_rows,
    tokens_per_tile,
    sliding_window,
    max_splits,
    CHUNK_UNIT: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    """Writes `PrefillPlan.rows` in one program.

    All chunks together cut tiles in at most max_splits places, because a chunk has at least 1 / max_splits of all keys.
    """
    total = 0
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = start + tl.arange(0, ROWS_AT_ONCE)
        tiles, units = _tiles_and_units(
            query_start_loc_ptr, seq_lens_ptr, first_row, rows, num_rows, tokens_per_tile, sliding_window, CHUNK_UNIT
        )
        total += tl.sum(tiles * units, 0)
    chunk_units = tl.maximum(tl.cdiv(total, max_splits), 1)

    stride = num_rows + 1
    num_programs = 0
    num_parts = 0
    num_divided = 0
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = start + tl.arange(0, ROWS_AT_ONCE)
        tiles, units = _tiles_and_units(
            query_start_loc_ptr, seq_lens_ptr, first_row, rows, num_rows, tokens_per_tile, sliding_window, CHUNK_UNIT
        )
        chunks = tl.maximum(tl.minimum(tl.cdiv(units, chunk_units), MAX_CHUNKS), 1)
        span = tl.maximum(tl.cdiv(units, chunks), 1)
        chunks = tl.maximum(tl.cdiv(units, span), 1)
        programs = tiles * chunks
        parts = tl.where(chunks > 1, programs, 0)
        divided = tl.where(chunks > 1, tiles, 0)
        mask = rows < num_rows
        tl.store(rows_ptr + rows, num_programs + tl.cumsum(programs, 0) - programs, mask=mask)
        tl.store(rows_ptr + stride + rows, chunks, mask=mask)
        tl.store(rows_ptr + 2 * stride + rows, span, mask=mask)
        tl.store(rows_ptr + 3 * stride + rows, num_parts + tl.cumsum(parts, 0) - parts, mask=mask)
        tl.store(rows_ptr + 4 * stride + rows, num_divided + tl.cumsum(divided, 0) - divided, mask=mask)
        num_programs += tl.sum(programs, 0)
        num_parts += tl.sum(parts, 0)
        num_divided += tl.sum(divided, 0)
    tl.store(rows_ptr + num_rows, num_programs)
    tl.store(rows_ptr + stride + num_rows, 0)
    tl.store(rows_ptr + 2 * stride + num_rows, 0)
    tl.store(rows_ptr + 3 * stride + num_rows, num_parts)
    tl.store(rows_ptr + 4 * stride + num_rows, num_divided)


@triton.jit
def _tiles_and_units(  # type: ignore[no-untyped-def]
    query_start_loc_ptr,
    seq_lens_ptr,
    first_row,
    rows,
    num_rows,
    tokens_per_tile,
    sliding_window,
    CHUNK_UNIT: tl.constexpr,
):
    """Returns the tiles of rows, 0 from num_rows on, and the most units of keys that one of its tiles sees."""
    mask = rows < num_rows
    query_start = tl.load(query_start_loc_ptr + first_row + rows, mask=mask, other=0)
    query_len = tl.load(query_start_loc_ptr + first_row + rows + 1, mask=mask, other=0) - query_start
    units = tl.cdiv(tl.load(seq_lens_ptr + first_row + rows, mask=mask, other=0), CHUNK_UNIT)
    # A window may begin and end within a unit.
    seen = tl.minimum(query_len, tokens_per_tile) + sliding_window - 1
    units = tl.where(sliding_window > 0, tl.minimum(units, tl.cdiv(seen, CHUNK_UNIT) + 1), units)
    return tl.cdiv(query_len, tokens_per_tile), units


@triton.jit
def find_row(firsts_ptr, num_rows, number, ROWS_AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the row of a program or divided tile, and the first one of that row.

    Args:
        firsts_ptr: [num_rows], first numbers of the rows, ascending.
        num_rows: rows of the plan.
        number: below the total.
        ROWS_AT_ONCE: rows of a load.
    """
    row = -1
    first = 0
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = start + tl.arange(0, ROWS_AT_ONCE)
        firsts = tl.load(firsts_ptr + rows, mask=rows < num_rows, other=0)
        begins_before = (firsts <= number) & (rows < num_rows)
        row += tl.sum(begins_before.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(begins_before, firsts, 0), 0))
    return row, first
