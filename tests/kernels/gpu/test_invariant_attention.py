"""Attention for `--batch-invariant`: a token has the same bits in any batch; test_paged_attention.py checks values."""

from dataclasses import replace

import pytest
import torch

from kernels.gpu.ops import GpuOps
from kernels.gpu.paged_attention import paged_attention
from tests.support.kernels.batches import assert_same_bits, fill_cache, make_ragged_batch

LENS = (200, 40)  # the decode kernel divides the former
WHOLE = [(0, 0, 200), (1, 0, 40)]
DIVISIONS = {
    "chunks of 37": [(0, 0, 37), (0, 37, 74)],
    "chunk beside decodes": [(0, 199, 200), (0, 63, 64), (0, 0, 1), (1, 30, 40)],
    "behind a prefix": [(1, 16, 40), (0, 160, 200)],
}
CASES = {
    "fp32": {},
    "window": {"sliding_window": 24},
    "bf16, groups of 3": {"dtype": torch.bfloat16, "num_heads": 3},
    "heads of 80, soft cap": {"head_dim": 80, "soft_cap": 5.0},
    "fp8 cache": {"kv_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name != "fp32" else name for name in CASES]
)
@pytest.mark.usefixtures("sums_in_order")
def test_a_token_has_the_same_bits_alone_in_chunks_and_in_any_batch(device, target, seed, name):
    options = dict(CASES[name])
    dtype = options.pop("dtype", torch.float32)
    kv_dtype = options.pop("kv_dtype", dtype)
    shape = {key: options.pop(key) for key in ("num_heads", "head_dim") if key in options}
    batch = make_ragged_batch(LENS, LENS, seed=seed, **{"num_heads": 2, "num_kv_heads": 1, **shape})
    ops = GpuOps(device, target, num_processors=132)
    cache = fill_cache(ops, batch, kv_dtype)
    starts = batch.metadata.query_start_loc.tolist()

    def attention(pieces):
        """Computes query tokens start:stop of a row for each (row, start, stop) in one call."""
        lens = [stop - start for _, start, stop in pieces]
        metadata = replace(
            batch.metadata,
            query_start_loc=torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
            seq_lens=torch.tensor([stop for _, _, stop in pieces], dtype=torch.int32, device=device),
            block_table=batch.metadata.block_table[[row for row, _, _ in pieces]].to(device),
            slot_mapping=torch.zeros(sum(lens), dtype=torch.int64, device=device),
            max_query_len=max(lens),
            num_one_token_reqs=next((i for i, length in enumerate(lens) if length > 1), len(lens)),
        )
        q = torch.cat([batch.q[starts[row] + start : starts[row] + stop] for row, start, stop in pieces])
        out = paged_attention(
            q.to(device, dtype),
            cache,
            metadata,
            scale=batch.scale,
            target=target,
            num_processors=132,
            batch_invariant=True,
            **options,
        )
        return out.float().cpu()

    whole = torch.cat([attention([piece]) for piece in WHOLE])
    for pieces in DIVISIONS.values():
        expected = [whole[starts[row] + start : starts[row] + stop] for row, start, stop in pieces]
        assert_same_bits(attention(pieces), torch.cat(expected))
