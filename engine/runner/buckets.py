"""Batch sizes of decode steps for which a GPU replays a recorded graph.

A graph is recorded for one number of rows; a step between two of them is padded to the larger one. Steps with prompts
in them run without padding and are no business of this module.
"""

from bisect import bisect_left
from collections.abc import Sequence

# Most rows up to which the step between two sizes is this. A decode step reads all weights whatever its size, so that a
# padding row costs next to nothing in a small batch; what it costs is its share of the matrix products and of the
# sampler. Up to 256 rows at most 7 are padding. From there on at most 6 % are (15 of 257, 31 of 513), where a finer
# ladder would only take memory and start-up time: a graph of an 8B model is some 300 kernels to record.
_STEPS = ((256, 8), (512, 16), (1 << 62, 32))
_SMALLEST = (1, 2, 4, 8)  # few users at once is common, and then a row is half the batch


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """The ladder up to max_num_seqs, which is always its last rung: 1, 2, 4, 8, 16, 24, ... 256, 272, ... 512, 544, ...

    Args:
        max_num_seqs: most rows of a step, >= 1.
    """
    ladder = [size for size in _SMALLEST if size < max_num_seqs]
    size = _SMALLEST[-1]
    for limit, step in _STEPS:
        while size + step <= min(limit, max_num_seqs - 1):
            size += step
            ladder.append(size)
    return (*ladder, max_num_seqs)


def bucket_of(num_rows: int, ladder: Sequence[int]) -> int:
    """The size to which a step of this many rows is padded: the smallest of an ascending ladder that holds them.

    Raises: ValueError: the ladder ends below num_rows.
    """
    index = bisect_left(ladder, num_rows)
    if index == len(ladder):
        raise ValueError(f"{num_rows} rows, the largest batch size is {ladder[-1] if ladder else 0}")
    return ladder[index]
