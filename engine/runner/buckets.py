"""Batch sizes of decode steps for which a GPU replays a recorded graph.

A graph is recorded for one number of rows; other steps are padded to the next larger number. Steps with prompts run
without padding.
"""

from bisect import bisect_left
from collections.abc import Sequence

# (rows, step between sizes up to these rows). A decode step reads all weights regardless of its size, so that a padding
# row costs little in a small batch: its share of the matrix products and of the sampler. Up to 256 rows at most 7 are
# padding, above that at most 6 % (15 of 257, 31 of 513). More sizes would cost memory and start-up time: recording a
# graph of an 8B model takes about 300 kernels.
_STEPS = ((256, 8), (512, 16), (1 << 62, 32))
_SMALLEST = (1, 2, 4, 8)  # small batches are common, and one row is a large part of them


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


def bucket_of(num_rows: int, sizes: Sequence[int]) -> int:
    """Returns the size to which a step of this many rows is padded: the smallest sufficient one of ascending sizes.

    Raises: ValueError: num_rows exceeds the largest size.
    """
    index = bisect_left(sizes, num_rows)
    if index == len(sizes):
        raise ValueError(f"{num_rows} rows, the largest batch size is {sizes[-1] if sizes else 0}")
    return sizes[index]
