"""Sizes of steps for which a GPU replays recorded graphs: rows of decode steps, tokens of steps with prompts.

A graph is recorded for one size; other steps are padded to the next larger one. Steps larger than all sizes run without
padding.
"""

from bisect import bisect_left
from collections.abc import Sequence

# (rows, step between sizes up to these rows). A decode step reads all weights regardless of its size, so that a padding
# row costs little in a small batch: its share of the matrix products and of the sampler. Up to 256 rows at most 7 are
# padding, above that at most 6 % (15 of 257, 31 of 513). More sizes would cost memory and start-up time: recording a
# graph of an 8B model takes about 300 kernels.
_STEPS = ((256, 8), (512, 16), (1 << 62, 32))
_SMALLEST = (1, 2, 4, 8)  # small batches are common, and one row is a large part of them

# Numbers of tokens of steps with prompts. From 128 on they are multiples of the rows in a tile of a matrix product, so
# padding adds few tiles. Beyond 512 the GPU takes longer than the host needs to launch the step: 8 ms for an 8B model.
_MIXED = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the batch sizes up to and including max_num_seqs: 1, 2, 4, 8, 16, 24, ... 256, 272, ... 512, 544, ...

    Args:
        max_num_seqs: most rows of a step, >= 1.
    """
    sizes = [size for size in _SMALLEST if size < max_num_seqs]
    size = _SMALLEST[-1]
    for limit, step in _STEPS:
        while size + step <= min(limit, max_num_seqs - 1):
            size += step
            sizes.append(size)
    return (*sizes, max_num_seqs)


def mixed_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Returns the numbers of tokens up to 512, or up to and including max_num_batched_tokens if that is less."""
    sizes = tuple(size for size in _MIXED if size < max_num_batched_tokens)
    return sizes if len(sizes) == len(_MIXED) else (*sizes, max_num_batched_tokens)


def padded_size(size: int, sizes: Sequence[int]) -> int:
    """Returns the smallest sufficient one of ascending sizes, or the size itself if all of them are smaller."""
    index = bisect_left(sizes, size)
    return size if index == len(sizes) else sizes[index]
