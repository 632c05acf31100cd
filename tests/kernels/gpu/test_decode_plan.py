"""The work list of decode attention: complete for all lengths, bounded by host numbers, balanced for uneven rows."""

import heapq

import numpy as np
import pytest
import torch

from kernels.gpu.decode_plan import CHUNK_UNIT, MAX_CHUNKS_PER_ROW, decode_plan
from kernels.metadata import AttentionMetadata

NUM_PROCESSORS = 132


@pytest.fixture(autouse=True)
def few_programs(monkeypatch, device):
    """The interpreter takes 10 ms per program, whatever its size."""
    if device.type == "cpu":
        monkeypatch.setattr("kernels.gpu.decode_plan._BLOCK_CHUNKS", 512)


def make_metadata(seq_lens, device, max_seq_len=None):
    num_rows = len(seq_lens)
    return AttentionMetadata(
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.zeros((num_rows, 1), dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(num_rows, dtype=torch.int64, device=device),
        block_size=16,
        max_query_len=1,
        max_seq_len=max_seq_len or max(*seq_lens, 1),
    )


def make_plan(seq_lens, device, *, num_kv_heads=8, max_seq_len=None, **options):
    options = {"sliding_window": None, "num_processors": NUM_PROCESSORS, **options}
    return decode_plan(
        make_metadata(seq_lens, device, max_seq_len),
        num_rows=len(seq_lens),
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        **options,
    )


def chunks_by_row(plan):
    """Returns the (first key, end key) of each row's chunks, after comparing the two tensors of the plan."""
    firsts, chunks = plan.first_chunks.tolist(), plan.chunks.tolist()
    assert firsts[0] == 0
    assert all(row == -1 for row, *_ in chunks[firsts[-1] :])
    by_row = []
    for row in range(len(firsts) - 1):
        own = chunks[firsts[row] : firsts[row + 1]]
        assert {chunk[0] for chunk in own} == {row}
        by_row.append([(start, end) for _, start, end, _ in own])
    return by_row


def lognormal(count, mean, sigma, longest, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), 1, longest).astype(int).tolist()


LENGTHS = {
    "borders of chunks": [1, 127, 128, 129, 255, 256, 257, 0, 1024],
    "padding only": [0, 0, 0],
    "one long row": [131_072],
    "more rows than are read at once": lognormal(300, 200, 1.0, 1024),
}


@pytest.mark.sampled
@pytest.mark.parametrize("seq_lens", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sliding_window", [None, 1, 300])
@pytest.mark.parametrize("num_processors", [1, NUM_PROCESSORS])
def test_chunks_of_a_row_are_the_keys_of_its_window(device, monkeypatch, seq_lens, sliding_window, num_processors):
    if seq_lens is LENGTHS["borders of chunks"]:
        monkeypatch.setattr("kernels.gpu.decode_plan._BLOCK_CHUNKS", 16)
    plan = make_plan(seq_lens, device, sliding_window=sliding_window, num_processors=num_processors)
    for seq_len, chunks in zip(seq_lens, chunks_by_row(plan), strict=True):
        starts, ends = [start for start, _ in chunks], [end for _, end in chunks]
        first_key = max(0, seq_len - sliding_window) if sliding_window else 0
        assert starts == [first_key // CHUNK_UNIT * CHUNK_UNIT, *ends[:-1]]
        assert ends[-1] == seq_len
        assert all(start < end for start, end in chunks) or (seq_len == 0 and len(chunks) == 1)
        assert all(end % CHUNK_UNIT == 0 for end in ends[:-1])
        assert len(chunks) <= MAX_CHUNKS_PER_ROW


def test_random_lengths_never_exceed_the_bound_of_the_list(device):
    """The list is as long as the host's numbers allow, and no chunk is cut off, whatever the lengths are."""
    random = np.random.default_rng(0)
    for _ in range(5):
        num_rows = int(random.integers(1, 40))
        seq_lens = (random.integers(0, 2, num_rows) * random.lognormal(6, 2, num_rows)).astype(int).tolist()
        num_kv_heads = int(random.choice([1, 8, 32]))
        for max_seq_len in (None, 1 << 17):
            plan = make_plan(seq_lens, device, num_kv_heads=num_kv_heads, max_seq_len=max_seq_len)
            num_chunks = len(plan.chunks)
            assert num_chunks <= num_rows + -(-9 * NUM_PROCESSORS // num_kv_heads)
            assert plan.parts.shape == (num_chunks, num_kv_heads, 16)
            for seq_len, chunks in zip(seq_lens, chunks_by_row(plan), strict=True):
                assert chunks[-1][1] == seq_len


def test_padding_and_the_largest_length_do_not_change_the_chunks(device):
    """A graph of a larger size computes the same bits as the batch alone."""
    seq_lens = lognormal(17, 2000, 1.0, 30_000)
    alone = chunks_by_row(make_plan(seq_lens, device))
    padded = chunks_by_row(make_plan([*seq_lens, *[0] * 7], device, max_seq_len=131_072))
    assert padded == [*alone, *[[(0, 0)]] * 7]


def test_layers_share_the_plan_of_a_step(device):
    metadata = make_metadata([300, 20], device)
    options = {"num_rows": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_processors": 4}
    plan = decode_plan(metadata, sliding_window=None, **options)
    assert decode_plan(metadata, sliding_window=None, **options) is plan
    assert decode_plan(metadata, sliding_window=16, **options) is not plan
    assert decode_plan(make_metadata([300, 20], device), sliding_window=None, **options) is not plan


def processor_loads(plan, num_kv_heads):
    """Returns the keys of each processor; programs start in grid order, on the processor with fewest keys so far."""
    keys = [end - start for chunks in chunks_by_row(plan) for start, end in chunks]
    loads = [0] * NUM_PROCESSORS
    for length in keys * num_kv_heads:
        heapq.heapreplace(loads, loads[0] + length)
    return loads


UNEVEN = {
    "33 of 512, one of 8k": [512] * 33 + [8192],
    "33 of 512, one of 32k": [512] * 33 + [32_768],
    "33 of 512, one of 128k": [512] * 33 + [131_072],
    "one of 128k first, 255 of 512": [131_072] + [512] * 255,
    "256 as in ShareGPT": lognormal(256, 380, 0.8, 2048),
    "64 as in Azure's trace": lognormal(64, 1300, 0.75, 8192),
    "8 of 2k on average": lognormal(8, 2000, 1.0, 8192),
    "8 of 512": [512] * 8,
    "one of 128k": [131_072],
}


@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
@pytest.mark.parametrize("mix", UNEVEN)
def test_processors_get_similar_numbers_of_keys(device, mix, num_kv_heads):
    """Cost model of decode attention: the device waits for its busiest processor.

    That one has at most 1.3 times the mean of the busy ones, or one chunk more where chunks have their least length.
    """
    loads = processor_loads(make_plan(UNEVEN[mix], device, num_kv_heads=num_kv_heads), num_kv_heads)
    mean = sum(loads) / sum(load > 0 for load in loads)
    assert max(loads) <= max(1.3 * mean, mean + CHUNK_UNIT)
