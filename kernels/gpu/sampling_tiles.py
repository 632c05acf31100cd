"""Tile sizes of the sampler, with the reason for each; unlike some of `kernels.gpu.tiles`, none was measured."""

from typing import NamedTuple

import triton

from kernels.gpu.targets import Target

MAX_VOCAB_SIZE = 1 << 19
"""Above it the masses of the sampler would overflow; real vocabularies end at about half of it."""

_MAX_TILES = 4096
"""Tiles of a row, whose largest logits one program keeps in registers: 16 for each of 256 threads."""

_PROGRAMS_PER_PROCESSOR = 4
"""Programs that read logits concurrently: with 16 KB in flight each, twice latency times bandwidth."""


class SamplingTile(NamedTuple):
    """Tile sizes of the sampler's kernels.

    Attributes:
        tile: logits of which the scan keeps the largest.
        chunk: logits that a program of the scan reads at a time, and whose mass it keeps.
        candidates: most tokens that are filtered in registers.
        draw_chunk: logits of which the best score is kept.
        draw_lanes: scores that are made at a time; each lane keeps its best.
        search_block: logits read at a time by a program that reads a whole row.
        id_bits: bits of a token id.
        scan_warps, draw_warps, row_warps: warps of kernels that read pieces, score pieces, and process a row in one
            program.
        num_processors: multiprocessors of the device.
    """

    tile: int
    chunk: int
    candidates: int
    draw_chunk: int
    draw_lanes: int
    search_block: int
    id_bits: int
    scan_warps: int
    draw_warps: int
    row_warps: int
    num_processors: int

    def shared_rows(self, num_rows: int, num_pieces: int) -> tuple[int, int]:
        """Returns the grid (rows, programs per row): enough programs to fill the GPU, computed from sizes alone.

        Programs of a row take its pieces in turn; results do not depend on how many programs there are.
        """
        return num_rows, max(1, min(num_pieces, _PROGRAMS_PER_PROCESSOR * self.num_processors // max(1, num_rows)))


def sampling_tile(vocab_size: int, target: Target, num_processors: int) -> SamplingTile:
    """Returns the sizes for rows of vocab_size logits on a device with this many multiprocessors.

    A tile is as small as the number of tiles allows, but at least 64 bytes. Among 2,000 tiles the k-th largest maximum
    is reached by 51 logits for k = 50, by 1,400 for k = 1,000, so that 2,048 candidates decide nearly every row that
    has a filter; a smaller vocabulary is all candidates. A chunk of 4,096 gives 128 threads 32 logits each, eight loads
    of 16 bytes. A score takes 115 instructions (sm_90), so the number of programs of a single row matters: of
    128,000 tokens, chunks of 8,192 make 16 programs of some 6 microseconds each.
    """
    id_bits = max(2, (vocab_size - 1).bit_length())
    return SamplingTile(
        tile=max(16, triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_TILES))),
        chunk=4096,
        candidates=min(2048, 1 << id_bits),
        draw_chunk=8192,
        draw_lanes=min(1024, 1 << id_bits),
        search_block=min(4096, 1 << id_bits),
        id_bits=id_bits,
        scan_warps=128 // target.warp_size,
        draw_warps=128 // target.warp_size,
        row_warps=256 // target.warp_size,
        num_processors=num_processors,
    )
