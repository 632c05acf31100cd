"""Every shape has a tile on every target; steps of decode tiles end where chunks of keys do."""

import pytest

from kernels.gpu import decode_plan, prefill_plan
from kernels.gpu.sampling_tiles import sampling_tile
from kernels.gpu.targets import TARGETS
from kernels.gpu.tiles import decode_tile, head_tiles, prefill_tile


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("kv_bits", [8, 16, 32])
@pytest.mark.parametrize("choose", [prefill_tile, decode_tile])
def test_every_target_has_tiles_for_every_shape(target, kv_bits, choose):
    for head_dim in range(16, 513, 16):
        for group_size in (1, 3, 7, 8, 17, 32, 71, 128):
            num_tiles = head_tiles(head_dim, group_size)
            assert group_size % num_tiles == 0
            for query_bits in (16, 32):
                tile = choose(target, head_dim, query_bits, kv_bits, group_size)
                assert group_size // num_tiles <= tile.block_m <= 128
                assert all(n & (n - 1) == 0 for n in (tile.block_m, tile.block_n, tile.num_warps))
                assert decode_plan.CHUNK_UNIT % tile.block_n == prefill_plan.CHUNK_UNIT % tile.block_n == 0


@pytest.mark.parametrize(
    ("value_dim", "group_size", "num_tiles"),
    [
        (128, 128, 1),
        (128, 129, 3),
        (256, 16, 1),
        (256, 40, 4),
        (512, 16, 1),
        (512, 20, 2),
        (512, 128, 8),
        (512, 37, 37),
    ],
)
def test_many_heads_per_kv_head_are_few_equal_tiles(value_dim, group_size, num_tiles):
    assert head_tiles(value_dim, group_size) == num_tiles


@pytest.mark.parametrize("name", ["sm_90", "sm_100"])
def test_prefill_tiles_fill_the_matrix_instructions_of_hopper(name):
    for head_dim in (64, 128, 256):
        tile = prefill_tile(TARGETS[name], head_dim, 16, 16, 4)
        assert tile.block_m // tile.num_warps * 4 >= 64  # rows per group of four warps


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.backend == "cuda"])
@pytest.mark.parametrize("choose", [prefill_tile, decode_tile])
def test_operands_in_float32_fit_into_shared_memory(name, choose):
    """Triton keeps queries, a step of keys or values and their weights there, as the compile check shows."""
    target = TARGETS[name]
    for head_dim in (64, 128, 256) if name == "sm_75" else (64, 128, 256, 512):  # where 512 take all of it
        tile = choose(target, head_dim, 32, 32, 4)
        num_values = (tile.block_m + tile.block_n) * head_dim + tile.block_m * tile.block_n
        assert 4 * num_values < target.max_shared_bytes, f"heads of {head_dim}"


def test_programs_of_the_sampler_share_a_row_only_in_small_batches():
    tile = sampling_tile(128_256, TARGETS["sm_90"], 132)
    assert [tile.shared_rows(num_rows, 32) for num_rows in (0, 1, 132, 1000)] == [(0, 32), (1, 32), (132, 4), (1000, 1)]
