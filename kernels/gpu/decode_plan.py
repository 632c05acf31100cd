"""Divides the keys of decode rows into chunks of similar length: the work list of `decode_attention`.

One long row among many short ones is read by the whole device: every chunk is a program of its own. A kernel makes the
list from the row lengths on the device, so a CUDA graph that contains it adapts to each replay. The list depends on the
lengths only, not on the rows of padding.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.tiles import PROGRAMS_PER_PROCESSOR
from kernels.metadata import AttentionMetadata

CHUNK_UNIT = 128
"""Chunks are multiples of this number of keys: two steps of most tiles, so that a program's first loads overlap."""

MAX_CHUNKS_PER_ROW = 128
"""More would make the reduction of a row, which is one program per head, as slow as its attention."""

_ROUNDS = 3
"""Chunks for each program that the device runs at once. The longest processor then has at most a ninth more keys than
the mean."""

_ROWS_AT_ONCE = 256
_BLOCK_CHUNKS = 16  # chunks of a program of the plan: a tile of 16 x 256 takes 32 registers per thread


class DecodePlan(NamedTuple):
    """Chunks of the decode rows of a step, and memory for their partial results.

    All layers of a step share it, so each layer overwrites the partial results of the one before.

    Attributes:
        chunks: [C, 4] int32: row, first key, end key, and length of the row; the row is -1 where there is no chunk. A
            row without keys has one empty chunk.
        first_chunks: [num_rows + 1] int32: chunks first_chunks[i]:first_chunks[i + 1] are those of row i.
        parts: [C, num_heads, head_dim] float32.
        part_lse: [C, num_heads] float32: logarithms (base 2) of the sums of the weights.
    """

    chunks: torch.Tensor
    first_chunks: torch.Tensor
    parts: torch.Tensor
    part_lse: torch.Tensor


def decode_plan(
    metadata: AttentionMetadata,
    *,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None,
    num_processors: int,
) -> DecodePlan:
    """Returns the plan of the first num_rows rows; launches its kernel once per step.

    Args:
        metadata: the batch; keeps the plan for the other layers of the step.
        num_rows: rows of one query token.
        num_heads, num_kv_heads, head_dim: as of the queries and the cache.
        sliding_window: keys before the window are in no chunk.
        num_processors: multiprocessors of the device; with the total of all lengths they decide the length of chunks.
    """
    key = (decode_plan, num_rows, num_heads, num_kv_heads, head_dim, sliding_window, num_processors)
    plan: DecodePlan | None = metadata.derived.get(key)
    if plan is None:
        max_splits = -(-_ROUNDS * PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)
        num_chunks = _max_num_chunks(num_rows, metadata.max_seq_len, max_splits)
        device = metadata.seq_lens.device
        plan = metadata.derived[key] = DecodePlan(
            chunks=torch.empty((num_chunks, 4), dtype=torch.int32, device=device),
            first_chunks=torch.empty(num_rows + 1, dtype=torch.int32, device=device),
            parts=torch.empty((num_chunks, num_heads, head_dim), dtype=torch.float32, device=device),
            part_lse=torch.empty((num_chunks, num_heads), dtype=torch.float32, device=device),
        )
        launch(
            _decode_plan_kernel,
            (triton.cdiv(num_chunks, _BLOCK_CHUNKS),),
            plan.chunks,
            plan.first_chunks,
            metadata.seq_lens,
            num_rows,
            num_chunks,
            sliding_window or 0,
            max_splits,
            CHUNK_UNIT=CHUNK_UNIT,
            MAX_CHUNKS_PER_ROW=MAX_CHUNKS_PER_ROW,
            ROWS_AT_ONCE=_ROWS_AT_ONCE,
            BLOCK_CHUNKS=_BLOCK_CHUNKS,
            num_warps=4,
        )
    return plan


def _max_num_chunks(num_rows: int, max_seq_len: int, max_splits: int) -> int:
    """Returns the most chunks that any row lengths up to max_seq_len need.

    All splits together cut rows in at most max_splits places.
    """
    longest = max(1, min(-(-max_seq_len // CHUNK_UNIT), MAX_CHUNKS_PER_ROW))
    return min(num_rows * longest, num_rows + max_splits)


@triton.jit(
    do_not_specialize=["seq_lens_ptr", "num_rows", "num_chunks", "sliding_window", "max_splits"],
)
def _decode_plan_kernel(  # type: ignore[no-untyped-def]
    chunks_ptr,
    first_chunks_ptr,
    seq_lens_ptr,
    num_rows,
    num_chunks,
    sliding_window,
    max_splits,
    CHUNK_UNIT: tl.constexpr,
    MAX_CHUNKS_PER_ROW: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Each program sums up all rows, then writes its own BLOCK_CHUNKS chunks; the first also writes first_chunks."""
    total = 0
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = start + tl.arange(0, ROWS_AT_ONCE)
        seq_lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
        first_units, end_units = _units(seq_lens, sliding_window, CHUNK_UNIT)
        total += tl.sum(end_units - first_units, 0)
    chunk_units = tl.maximum(tl.cdiv(total, max_splits), 1)

    chunks = tl.program_id(0) * BLOCK_CHUNKS + tl.arange(0, BLOCK_CHUNKS)
    row_of = tl.full((BLOCK_CHUNKS,), -1, tl.int32)
    index_of = tl.zeros((BLOCK_CHUNKS,), tl.int32)
    num_before = 0
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = start + tl.arange(0, ROWS_AT_ONCE)
        seq_lens = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
        first_units, end_units = _units(seq_lens, sliding_window, CHUNK_UNIT)
        span = _span(end_units - first_units, chunk_units, MAX_CHUNKS_PER_ROW)
        counts = tl.where(rows < num_rows, tl.maximum(tl.cdiv(end_units - first_units, span), 1), 0)
        ends = num_before + tl.cumsum(counts, 0)
        starts = ends - counts
        is_own = (starts[None, :] <= chunks[:, None]) & (chunks[:, None] < ends[None, :])
        row_of += tl.sum(tl.where(is_own, rows[None, :] + 1, 0), 1)
        index_of += tl.sum(tl.where(is_own, chunks[:, None] - starts[None, :], 0), 1)
        tl.store(first_chunks_ptr + rows, starts, mask=(rows < num_rows) & (tl.program_id(0) == 0))
        num_before += tl.sum(counts, 0)
    tl.store(first_chunks_ptr + num_rows, num_before, mask=tl.program_id(0) == 0)

    seq_lens = tl.load(seq_lens_ptr + row_of, mask=row_of >= 0, other=0)
    first_units, end_units = _units(seq_lens, sliding_window, CHUNK_UNIT)
    span = _span(end_units - first_units, chunk_units, MAX_CHUNKS_PER_ROW)
    first_keys = (first_units + index_of * span) * CHUNK_UNIT
    mask = chunks < num_chunks
    tl.store(chunks_ptr + 4 * chunks, row_of, mask=mask)
    tl.store(chunks_ptr + 4 * chunks + 1, first_keys, mask=mask)
    tl.store(chunks_ptr + 4 * chunks + 2, tl.minimum(first_keys + span * CHUNK_UNIT, seq_lens), mask=mask)
    tl.store(chunks_ptr + 4 * chunks + 3, seq_lens, mask=mask)


@triton.jit
def _units(seq_lens, sliding_window, CHUNK_UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first unit of keys in the window of the last token, or of all keys if it is 0, and the end."""
    first_keys = tl.where(sliding_window > 0, tl.maximum(seq_lens - sliding_window, 0), 0)
    return first_keys // CHUNK_UNIT, tl.cdiv(seq_lens, CHUNK_UNIT)


@triton.jit
def _span(num_units, chunk_units, MAX_CHUNKS_PER_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the units of each chunk of rows of num_units: at most chunk_units, unless a row would have too many."""
    num_chunks = tl.minimum(tl.cdiv(num_units, chunk_units), MAX_CHUNKS_PER_ROW)
    return tl.cdiv(tl.maximum(num_units, 1), tl.maximum(num_chunks, 1))
