"""The CPU kernel against the reference, over ragged mixes."""

import re

import numba
import pytest
import torch

from kernels.cpu import paged_attention as module
from kernels.cpu.paged_attention import paged_attention
from kernels.reference.paged_attention import paged_attention as reference
from kernels.testing import assert_close, make_ragged_batch

MIXES = {
    "decodes": ([1, 1, 1, 1], [1, 16, 17, 301]),
    "short chunks": ([5, 5, 7], [5, 21, 300]),
    "long chunk": ([129], [129]),
    "chunk of a longer prompt": ([129], [333]),
    "decodes, then chunks": ([1, 1, 5, 129], [40, 333, 77, 257]),
    "block borders": ([1, 1, 1, 15, 16, 17, 16], [15, 16, 17, 15, 16, 17, 32]),
}


def check(batch, sliding_window=None):
    arguments = batch.q, batch.k_cache, batch.v_cache, batch.metadata
    expected = reference(*arguments, scale=batch.scale, sliding_window=sliding_window)
    assert_close(paged_attention(*arguments, scale=batch.scale, sliding_window=sliding_window), expected)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("sliding_window", [None, 1, 13, 16, 100])
def test_paged_attention_equals_reference_on_mix(mix, sliding_window):
    check(make_ragged_batch(*MIXES[mix]), sliding_window)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_paged_attention_equals_reference_for_group_size(group_size, num_kv_heads):
    check(
        make_ragged_batch(
            *MIXES["decodes, then chunks"], num_heads=group_size * num_kv_heads, num_kv_heads=num_kv_heads
        )
    )


@pytest.mark.parametrize("head_dim", [6, 32, 64, 80, 128])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_paged_attention_equals_reference_for_shape(head_dim, block_size):
    check(make_ragged_batch([1, 9, 30], [50, 65, 31], head_dim=head_dim, block_size=block_size), sliding_window=40)


def test_paged_attention_equals_reference_on_random_batches():
    generator = torch.Generator().manual_seed(1)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for seed in range(30):
        query_lens = [draw(1, 3) if draw(0, 2) else draw(1, 40) for _ in range(draw(1, 9))]
        seq_lens = [query_len + draw(0, 90) for query_len in query_lens]
        check(make_ragged_batch(query_lens, seq_lens, head_dim=32, seed=seed), sliding_window=draw(1, 120))


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7, 64])
def test_shares_cover_every_item_once(num_shares, monkeypatch):
    """Also of batches with fewer items than shares; what no share computes stays NaN."""
    monkeypatch.setattr(numba, "get_num_threads", lambda: num_shares)
    monkeypatch.setattr(module, "PARALLEL_COST", 0)
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: torch.full(*shape, torch.nan, **kwargs))
    for query_lens, seq_lens in MIXES.values():
        check(make_ragged_batch(query_lens, seq_lens))


def test_paged_attention_reads_queries_inside_a_fused_projection():
    batch = make_ragged_batch(*MIXES["decodes, then chunks"])
    fused = torch.cat((batch.q, torch.full_like(batch.q, torch.nan)), dim=1)
    q = fused[:, : batch.q.shape[1]]
    assert not q.is_contiguous()
    arguments = batch.k_cache, batch.v_cache, batch.metadata
    assert torch.equal(
        paged_attention(q, *arguments, scale=batch.scale), paged_attention(batch.q, *arguments, scale=batch.scale)
    )


def test_result_of_a_row_does_not_depend_on_the_batch():
    batch = make_ragged_batch([5, 1, 40], [20, 90, 70])
    together = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, scale=batch.scale)
    for row, (start, stop) in enumerate(((0, 5), (5, 6), (6, 46))):
        alone = type(batch.metadata)(
            query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=batch.metadata.seq_lens[row : row + 1],
            block_table=batch.metadata.block_table[row : row + 1],
            slot_mapping=batch.metadata.slot_mapping[start:stop],
            block_size=16,
            max_query_len=stop - start,
            max_seq_len=int(batch.metadata.seq_lens[row]),
        )
        out = paged_attention(batch.q[start:stop], batch.k_cache, batch.v_cache, alone, scale=batch.scale)
        assert torch.equal(out, together[start:stop])


def test_nan_stays_in_its_row():
    batch = make_ragged_batch([1, 1, 20], [50, 50, 50])
    poisoned = int(batch.metadata.block_table[1, 1])
    batch.k_cache[poisoned, 3, 0, 0] = torch.nan
    out = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, scale=batch.scale)
    assert out[1, :2].isnan().all()  # the query heads of the poisoned KV head
    assert not out[1, 2:].isnan().any()
    assert not out[[0, *range(2, 22)]].isnan().any()


def test_infinite_scores_become_nan_and_not_a_number_that_looks_right():
    batch = make_ragged_batch([1], [40])
    batch.k_cache[int(batch.metadata.block_table[0, 0]), 0] = torch.inf
    out = paged_attention(batch.q.abs(), batch.k_cache, batch.v_cache, batch.metadata, scale=batch.scale)
    assert out.isnan().all()


def test_scores_far_apart_do_not_overflow():
    batch = make_ragged_batch([3, 1], [40, 40])
    q = batch.q * 500
    arguments = batch.k_cache, batch.v_cache, batch.metadata
    assert_close(paged_attention(q, *arguments, scale=1.0), reference(q, *arguments, scale=1.0))


def test_shapes_that_disagree_are_named():
    batch = make_ragged_batch([1], [4], num_heads=6, num_kv_heads=2, head_dim=32)
    with pytest.raises(ValueError, match=re.escape("q [1, 5, 32] does not fit caches [4, 16, 2, 32]")):
        paged_attention(batch.q[:, :5], batch.k_cache, batch.v_cache, batch.metadata, scale=1.0)
    with pytest.raises(ValueError, match=r"k_cache is torch\.float16 on cpu, CPU operations take float32"):
        paged_attention(batch.q, batch.k_cache.half(), batch.v_cache, batch.metadata, scale=1.0)
    k_cache = batch.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"k_cache of shape \[4, 16, 2, 32\] is not contiguous"):
        paged_attention(batch.q, k_cache, batch.v_cache, batch.metadata, scale=1.0)
