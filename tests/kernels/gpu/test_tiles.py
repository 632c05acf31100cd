"""Every shape has a tile on every target; the number of splits follows from sizes."""

import pytest

from kernels.gpu.sampling_tiles import sampling_tile
from kernels.gpu.targets import TARGETS
from kernels.gpu.tiles import MAX_SPLITS, SPLIT_KEYS, decode_tile, num_splits, prefill_tile


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("kv_bits", [8, 16, 32])
@pytest.mark.parametrize("choose", [prefill_tile, decode_tile])
def test_every_target_has_tiles_for_every_shape(target, kv_bits, choose):
    for head_dim in range(16, 257, 16):
        for group_size in (1, 3, 7, 8, 17, 71, 128):
            for query_bits in (16, 32):
                tile = choose(target, head_dim, query_bits, kv_bits, group_size)
                assert group_size <= tile.block_m <= 128
                assert all(n & (n - 1) == 0 for n in (tile.block_m, tile.block_n, tile.num_warps))


@pytest.mark.parametrize("name", ["sm_90", "sm_100"])
def test_prefill_tiles_fill_the_matrix_instructions_of_hopper(name):
    for head_dim in (64, 128, 256):
        tile = prefill_tile(TARGETS[name], head_dim, 16, 16, 4)
        assert tile.block_m // tile.num_warps * 4 >= 64  # rows per group of four warps


def test_a_full_batch_is_not_split():
    assert num_splits(256, 8, 131_072, 132) == 1


def test_few_long_rows_fill_the_device():
    assert num_splits(1, 8, 131_072, 132) * 8 > 132


def test_splits_never_grow_with_the_batch():
    for num_kv_heads in (1, 2, 8, 32):
        counts = [num_splits(num_rows, num_kv_heads, 131_072, 132) for num_rows in range(1, 600)]
        assert counts == sorted(counts, reverse=True)
        assert 1 <= counts[-1] <= counts[0] <= MAX_SPLITS


def test_short_rows_are_not_split():
    assert num_splits(1, 8, SPLIT_KEYS, 132) == 1
    assert num_splits(1, 8, 4 * SPLIT_KEYS, 132) == 4


def test_programs_of_the_sampler_share_a_row_only_in_small_batches():
    tile = sampling_tile(128_256, TARGETS["sm_90"], 132)
    assert [tile.shared_rows(num_rows, 32) for num_rows in (0, 1, 132, 1000)] == [(0, 32), (1, 32), (132, 4), (1000, 1)]
