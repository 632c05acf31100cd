"""Which batch sizes decode steps are padded to."""

import itertools

import pytest

from engine.runner.buckets import decode_buckets, mixed_buckets, padded_size


@pytest.mark.parametrize(
    ("max_num_seqs", "ladder"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (16, (1, 2, 4, 8, 16)),
        (33, (1, 2, 4, 8, 16, 24, 32, 33)),
    ],
)
def test_a_ladder_ends_with_the_largest_batch(max_num_seqs, ladder):
    assert decode_buckets(max_num_seqs) == ladder


def test_steps_widen_as_batches_grow():
    ladder = decode_buckets(1024)
    steps = {low: high - low for low, high in itertools.pairwise(ladder)}
    assert {steps[low] for low in ladder if 8 <= low < 256} == {8}
    assert {steps[low] for low in ladder if 256 <= low < 512} == {16}
    assert {steps[low] for low in ladder if 512 <= low < 1024} == {32}
    assert len(ladder) == 67


@pytest.mark.parametrize("max_num_seqs", [1, 7, 64, 100, 256, 300, 1000])
def test_every_batch_has_the_smallest_size_that_holds_it(max_num_seqs):
    ladder = decode_buckets(max_num_seqs)
    assert list(ladder) == sorted(set(ladder))
    for num_rows in range(1, max_num_seqs + 1):
        assert padded_size(num_rows, ladder) == min(size for size in ladder if size >= num_rows)


@pytest.mark.parametrize("ladder", [(), (1, 2)])
def test_a_batch_beyond_the_ladder_is_not_padded(ladder):
    assert padded_size(3, ladder) == 3


def test_steps_with_prompts_are_padded_up_to_512_tokens_and_by_tiles_of_64():
    sizes = mixed_buckets(2048)
    assert sizes == (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
    assert mixed_buckets(512) == sizes
    assert mixed_buckets(100) == (16, 32, 64, 100)
    assert mixed_buckets(1) == (1,)
