"""The work list of prefill attention: complete, bounded by host numbers, balanced; whole prompts are not divided."""

import heapq
import itertools

import numpy as np
import pytest
import torch

from kernels.gpu.prefill_plan import CHUNK_UNIT, MAX_CHUNKS_PER_TILE, prefill_plan
from kernels.metadata import AttentionMetadata

NUM_PROCESSORS = 132
BLOCK_M, GROUP_SIZE = 128, 4
TOKENS_PER_TILE = BLOCK_M // GROUP_SIZE


def make_plan(query_lens, seq_lens, device, *, num_kv_heads=8, sliding_window=None):
    """Returns the plan of rows."""
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.zeros((len(seq_lens), 1), dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=device),
        block_size=16,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return prefill_plan(
        metadata,
        first_row=0,
        num_tokens=sum(query_lens),
        num_kv_heads=num_kv_heads,
        head_dim=16,
        block_m=BLOCK_M,
        tokens_per_tile=TOKENS_PER_TILE,
        sliding_window=sliding_window,
        num_processors=NUM_PROCESSORS,
    )


def tile_chunks(plan, query_lens, seq_lens, sliding_window=None):
    """Returns the keys (start, end) of the chunks of each tile, in order, after comparing the columns of the plan."""
    if plan.max_divided_tiles == 0:
        parts, divided, span = ([0] * (len(query_lens) + 1) for _ in range(3))
        chunks = [1] * len(query_lens)
        tiles_of = [-(-query_len // TOKENS_PER_TILE) for query_len in query_lens]
        programs = [0, *itertools.accumulate(tiles_of)]
    else:
        programs, chunks, span, parts, divided = plan.rows.tolist()
    num_programs = num_parts = num_divided = 0
    tiles = []
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        count = -(-query_len // TOKENS_PER_TILE)
        assert (programs[row], parts[row], divided[row]) == (num_programs, num_parts, num_divided)
        assert 1 <= chunks[row] <= MAX_CHUNKS_PER_TILE
        num_programs += count * chunks[row]
        if chunks[row] > 1:
            num_parts += count * chunks[row]
            num_divided += count
        for first in range(0, query_len, TOKENS_PER_TILE):
            position = seq_len - query_len + first
            end = min(position + TOKENS_PER_TILE, seq_len)
            start = max(0, position - sliding_window + 1) if sliding_window else 0
            if chunks[row] == 1:
                tiles.append([(start, end)])
                continue
            borders = [start // CHUNK_UNIT * CHUNK_UNIT + i * span[row] * CHUNK_UNIT for i in range(chunks[row] + 1)]
            assert borders[-1] >= end
            tiles.append([(max(a, start), min(b, end)) for a, b in itertools.pairwise(borders) if a < end])
    assert (programs[-1], parts[-1], divided[-1]) == (num_programs, num_parts, num_divided)
    assert num_programs <= plan.max_programs
    assert num_parts <= len(plan.parts) == len(plan.part_lse)
    assert num_divided <= plan.max_divided_tiles
    return tiles


def lognormal(count, mean, sigma, longest, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), 1, longest).astype(int).tolist()


def test_random_rows_keep_within_the_bounds_and_chunks_cover_all_keys(device):
    """`tile_chunks` compares the columns; rows without tokens or keys, which are padding, have none."""
    random = np.random.default_rng(0)
    for sliding_window in (None, 1, 700, 4096):
        for _ in range(4):
            query_lens = random.integers(0, 300, random.integers(1, 40)).tolist()
            query_lens[0] += 1
            prefixes = (random.integers(0, 2, len(query_lens)) * random.lognormal(7, 2, len(query_lens))).astype(int)
            seq_lens = [int(prefix) + query_len for prefix, query_len in zip(prefixes, query_lens, strict=True)]
            options = {"num_kv_heads": int(random.choice([1, 8, 32])), "sliding_window": sliding_window}
            plan = make_plan(query_lens, seq_lens, device, **options)
            tile_chunks(plan, query_lens, seq_lens, sliding_window)


@pytest.mark.parametrize("num_tokens", [4096, 8192])
@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_steps_of_whole_prompts_are_not_divided_and_launch_no_merge(device, num_tokens, num_rows):
    query_lens = [num_tokens // num_rows] * num_rows
    plan = make_plan(query_lens, query_lens, device)
    assert all(len(chunks) == 1 for chunks in tile_chunks(plan, query_lens, query_lens))
    assert plan.max_divided_tiles == 0
    # The largest step is measured at start; no other one takes more memory.
    assert len(plan.parts) == 2 * -(-4 * NUM_PROCESSORS // 8)
    assert plan.max_programs <= num_tokens // TOKENS_PER_TILE + num_rows


def test_layers_share_the_plan_of_a_step(device):
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 20], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([3000], dtype=torch.int32, device=device),
        block_table=torch.zeros((1, 1), dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(20, dtype=torch.int64, device=device),
        block_size=16,
        max_query_len=20,
        max_seq_len=3000,
    )
    sizes = {"first_row": 0, "num_tokens": 20, "num_kv_heads": 1, "head_dim": 16, "block_m": 16, "tokens_per_tile": 16}
    plan = prefill_plan(metadata, sliding_window=None, num_processors=4, **sizes)
    assert prefill_plan(metadata, sliding_window=None, num_processors=4, **sizes) is plan
    assert prefill_plan(metadata, sliding_window=16, num_processors=4, **sizes) is not plan


def after(prefixes, query_lens):
    return query_lens, [prefix + query_len for prefix, query_len in zip(prefixes, query_lens, strict=True)]


MIXES = {
    "16 behind 128k": after([131_072], [16]),
    "100 behind 32k": after([32_768], [100]),
    "512 behind 32k": after([32_768], [512]),
    "100 behind 2k": after([2048], [100]),
    "one of 16 behind 128k, a prompt of 2,000": after([131_072, 0], [16, 2000]),
    "8 of 64, lognormal prefixes": after(lognormal(8, 16_000, 1.0, 131_072), [64] * 8),
    "16 lognormal chunks, lognormal prefixes": after(
        lognormal(16, 8000, 1.2, 131_072), lognormal(16, 100, 1.0, 512, 1)
    ),
    "40 of 30, lognormal prefixes": after(lognormal(40, 8000, 1.5, 131_072, 2), [30] * 40),
    "2,048 in 4 behind lognormal prefixes": after(lognormal(4, 30_000, 1.0, 131_072, 3), [512] * 4),
}


@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
@pytest.mark.parametrize(
    ("mix", "sliding_window"), [*((mix, None) for mix in MIXES), *((mix, 4096) for mix in MIXES if "prompt" not in mix)]
)
def test_multiprocessors_get_similar_numbers_of_keys(device, mix, sliding_window, num_kv_heads):
    """Cost model: the device waits for its busiest multiprocessor; programs start in grid order, on the least busy one.

    That one has at most 1.3 times the mean of all, or one unit of keys more where chunks have their least length.
    """
    options = {"sliding_window": sliding_window}
    tiles = tile_chunks(make_plan(*MIXES[mix], device, num_kv_heads=num_kv_heads, **options), *MIXES[mix], **options)
    keys = [end - start for chunks in tiles for start, end in chunks]
    loads = [0] * NUM_PROCESSORS
    for length in keys[::-1] * num_kv_heads:
        heapq.heapreplace(loads, loads[0] + length)
    mean = sum(loads) / NUM_PROCESSORS
    assert max(loads) <= max(1.3 * mean, mean + CHUNK_UNIT)
