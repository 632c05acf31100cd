from dataclasses import replace

import numpy as np
import pytest

from loadgen.trace.oracle import Reuse, ideal_cached_tokens, ideal_reuse
from loadgen.trace.reader import read_trace
from loadgen.trace.window import fit, scale_lengths


def row(index, input_tokens, blocks, block_tokens=4):
    return {
        "arrival_s": index,
        "input_tokens": input_tokens,
        "output_tokens": 1,
        "blocks": blocks,
        "block_tokens": block_tokens,
    }


def common_beginning(trace, index, earlier):
    """By comparing prompts token by token, each token being its block's id and its place in the block."""

    def tokens(request):
        size = trace.blocks.block_tokens
        return [(block, place) for block in trace.blocks.of(request) for place in range(size)][
            : trace.input_tokens[request]
        ]

    mine, theirs = tokens(index), tokens(earlier)
    same = [one == other for one, other in zip(mine, theirs, strict=False)]
    return same.index(False) if False in same else len(same)


def brute_force(trace):
    return [max((common_beginning(trace, i, j) for j in range(i)), default=0) for i in range(len(trace))]


def test_by_hand(write_rows):
    trace = read_trace(
        write_rows(
            row(0, 9, [1, 2, 3]), row(1, 9, [1, 2, 4]), row(2, 9, [9, 2, 3]), row(3, 9, [1, 2, 3]), row(4, 4, [1])
        )
    )
    assert ideal_cached_tokens(trace).tolist() == [0, 8, 0, 9, 4]
    reuse = ideal_reuse(trace)
    assert reuse == pytest.approx((6 / 13, 21 / 40, 3 / 5))


def test_a_block_is_in_the_cache_as_far_as_it_was_filled(write_rows):
    trace = read_trace(
        write_rows(
            row(0, 6, [1, 2]), row(1, 12, [1, 2, 3]), row(2, 12, [1, 2, 3]), row(3, 5, [1, 2]), row(4, 7, [1, 2])
        )
    )
    assert ideal_cached_tokens(trace).tolist() == [0, 6, 12, 5, 7]


@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force_on_random_trees(write_rows, seed):
    random = np.random.default_rng(seed)
    rows = []
    for index in range(60):
        length = int(random.integers(1, 24))
        rows.append(row(index, length, random.integers(0, 3, -(-length // 4)).tolist()))
    trace = read_trace(write_rows(*rows))
    assert ideal_cached_tokens(trace).tolist() == brute_force(trace)
    clipped = fit(trace, 10, "clip")
    assert ideal_cached_tokens(clipped).tolist() == brute_force(clipped)
    scaled = scale_lengths(trace, 2.5)
    assert ideal_cached_tokens(scaled).tolist() == brute_force(scaled)


def test_without_blocks_nothing_is_shared(write_rows):
    trace = read_trace(write_rows({"arrival_s": 0, "input_tokens": 9, "output_tokens": 1}))
    assert ideal_cached_tokens(trace).tolist() == [0]
    assert ideal_reuse(trace) == Reuse(0.0, 0.0, 0.0)


def test_the_order_of_arrival_decides(write_rows):
    trace = read_trace(write_rows(row(0, 4, [1]), row(1, 8, [1, 2])))
    assert ideal_cached_tokens(trace).tolist() == [0, 4]
    swapped = replace(trace.take(np.array([1, 0]), ""), arrival_s=trace.arrival_s)
    assert ideal_cached_tokens(swapped).tolist() == [0, 4]


def test_whole_blocks_that_scale_evenly_keep_the_reuse_exactly(write_rows):
    random = np.random.default_rng(1)
    rows = [
        row(i, 64 * n, random.integers(0, 2, n).tolist(), 64) for i, n in enumerate(random.integers(1, 9, 80).tolist())
    ]
    trace = read_trace(write_rows(*rows))
    for factor in (0.125, 0.5, 3):
        assert ideal_reuse(scale_lengths(trace, factor)) == pytest.approx(ideal_reuse(trace))
