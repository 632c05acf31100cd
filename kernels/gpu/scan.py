"""The single pass over all logits: the largest of each tile, and the probability mass of larger chunks.

Later kernels read these numbers, and only those logits that matter according to them. Invalid values, NaN and +inf,
yield a largest value of +inf.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.sampling_tiles import SamplingTile
from kernels.gpu.token_order import INF, row_pointer
from kernels.sampling import SamplingBatch

LOG2_E = tl.constexpr(1.4426950408889634)


class Logits(NamedTuple):
    """Logits of S rows, before and after penalties, biases and masks; kernels choose by row (`row_pointer`).

    Attributes:
        raw: [S, vocab_size] float32, contiguous.
        adjusted: [S, vocab_size] float32; only adjusted rows are initialized.
        is_adjusted: [S] int8, 1 for adjusted rows.
        any_adjusted: False if no row of the batch can be adjusted; the previous two are then placeholders.
    """

    raw: torch.Tensor
    adjusted: torch.Tensor
    is_adjusted: torch.Tensor
    any_adjusted: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three tensors, in the order of the kernels' parameters."""
        return self[:3]


def unadjusted(logits: torch.Tensor) -> Logits:
    """Returns raw logits [S, vocab_size] as rows of which none is adjusted."""
    return Logits(logits, logits, logits, any_adjusted=False)


class Scan(NamedTuple):
    """Results of one pass over the logits.

    Attributes:
        tile_max: [S, num_tiles] float32, largest logit of each tile.
        chunk_max, chunk_sum: [S, num_chunks] float32, of each chunk the largest logit and sum of exp((logit - largest)
            / temperature); only of rows that need it.
    """

    tile_max: torch.Tensor
    chunk_max: torch.Tensor
    chunk_sum: torch.Tensor


def scan_rows(logits: Logits, batch: SamplingBatch, *, tile: SamplingTile, for_logprobs: bool = False) -> Scan:
    """Reads every logit once.

    Args:
        logits: logits of the rows.
        batch: gives the temperatures of the sums, which are computed only for rows with top_p and no other filter.
        tile: sizes.
        for_logprobs: scans only rows that report log-probabilities; sums at temperature 1.
    """
    num_rows, vocab_size = logits.raw.shape
    num_tiles, num_chunks = triton.cdiv(vocab_size, tile.tile), triton.cdiv(vocab_size, tile.chunk)
    scan = Scan(*(torch.empty((num_rows, n), device=logits.raw.device) for n in (num_tiles, num_chunks, num_chunks)))
    launch(
        _scan_kernel,
        tile.shared_rows(num_rows, num_chunks),
        *logits.tensors,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.top_logprobs,
        *scan,
        vocab_size,
        num_tiles,
        num_chunks,
        FOR_LOGPROBS=for_logprobs,
        HAS_ADJUSTED=logits.any_adjusted,
        TILE=tile.tile,
        CHUNK=tile.chunk,
        num_warps=tile.scan_warps,
    )
    return scan


@triton.jit
def row_mass(chunk_max_ptr, chunk_sum_ptr, row, num_chunks, top, temperature, CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the sum of exp((logit - top) / temperature) over a row in fp64, from the scan."""
    chunks = tl.arange(0, CHUNKS)
    offsets = row * num_chunks + chunks
    peaks = tl.load(chunk_max_ptr + offsets, mask=chunks < num_chunks, other=-INF).to(tl.float64)
    sums = tl.load(chunk_sum_ptr + offsets, mask=chunks < num_chunks, other=0.0).to(tl.float64)
    return tl.sum(sums * tl.exp((peaks - top.to(tl.float64)) / temperature))


@triton.jit(
    do_not_specialize=[
        "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "top_logprobs_ptr", "num_tiles", "num_chunks"
    ]
)  # fmt: skip
def _scan_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    adjusted_ptr,
    is_adjusted_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    top_logprobs_ptr,
    tile_max_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    vocab_size,
    num_tiles,
    num_chunks,
    FOR_LOGPROBS: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Scans chunks of one row: every num_programs(1)-th chunk from program_id(1) on."""
    row = tl.program_id(0)
    if FOR_LOGPROBS:
        is_scanned = tl.load(top_logprobs_ptr + row) >= 0
        has_sums = is_scanned
        scale = tl.full([], LOG2_E, tl.float32)
    else:
        temperature = tl.load(temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        is_scanned = tl.full([], 1, tl.int1)
        has_sums = (temperature > 0.0) & (tl.load(top_p_ptr + row) < 1.0) & (tl.load(min_p_ptr + row) <= 0.0)
        has_sums = has_sums & ((top_k <= 0) | (top_k >= vocab_size))
        scale = (1.0 / tl.maximum(temperature, 1e-30) * LOG2_E).to(tl.float32)
    if is_scanned:
        row_ptr = row_pointer(raw_ptr, adjusted_ptr, is_adjusted_ptr, row, vocab_size, HAS_ADJUSTED)
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            tiles = chunk * (CHUNK // TILE) + tl.arange(0, CHUNK // TILE)
            ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
            x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-INF)
            x = tl.where(x < INF, x, INF)
            maxima = tl.max(x, axis=1)
            tl.store(tile_max_ptr + row * num_tiles + tiles, maxima, mask=tiles < num_tiles)
            if has_sums:
                peak = tl.max(maxima, axis=0)
                base = tl.where((peak > -INF) & (peak < INF), peak, 0.0)
                mass = tl.sum(tl.exp2((x - base) * scale))
                tl.store(chunk_max_ptr + row * num_chunks + chunk, peak)
                tl.store(chunk_sum_ptr + row * num_chunks + chunk, mass)
