"""Plans of rows: the bounds of min_p and of the candidates, on which all later kernels rely."""

import math

import numpy as np
import pytest
import torch

from kernels.gpu.plan_rows import plan_rows
from kernels.gpu.sampling_tiles import sampling_tile
from kernels.gpu.scan import scan_rows, unadjusted
from kernels.sampling import SampledTokens


@pytest.fixture
def plan(device, target):
    """plan(logits, batch) -> RowPlans on the CPU."""

    def plan(logits, batch):
        num_rows = len(logits)
        logits, batch = logits.to(device), batch.to(device)
        tile = sampling_tile(logits.shape[1], target, 132)
        nothing = torch.empty(0, device=device)
        status = torch.empty(num_rows, dtype=torch.int8, device=device)
        result = SampledTokens(
            torch.empty(num_rows, dtype=torch.int64, device=device), status, nothing, nothing, nothing
        )
        rows = unadjusted(logits)
        plans = plan_rows(rows, scan_rows(rows, batch, tile=tile), batch, result, tile=tile)
        return type(plans)(*(column.cpu() for column in plans))

    return plan


def key(x):
    bits = int(np.float32(x).view(np.int32))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


def test_floor_is_the_lowest_float_that_min_p_keeps(plan, sampling_batch, seed):
    """Bit for bit: the next float below it is not kept by the rule as the CPU computes it."""
    rng = np.random.default_rng(seed)
    tops = np.float32([0.0, -1e-30, 3e38, *rng.standard_normal(9) * 10.0 ** rng.integers(-4, 5, 9)])
    rows = [
        {"temperature": float(rng.choice([0.01, 0.7, 1.0, 3.0])), "min_p": float(rng.choice([1.0, 0.5, 0.02, 1e-9]))}
        for _ in tops
    ]
    plans = plan(torch.from_numpy(tops)[:, None].contiguous(), sampling_batch(rows))
    for top, row, floor in zip(tops, rows, plans.floor_key.tolist(), strict=True):
        least, lowest = math.log(row["min_p"]), np.float32(top)

        def is_kept(x):
            return (float(x) - float(top)) / row["temperature"] >= least  # noqa: B023 - called within the turn

        lowest = np.float32(max(float(top) + row["temperature"] * least, -3.4e38))
        while is_kept(lowest):
            lowest = np.nextafter(lowest, np.float32(-np.inf))
        while not is_kept(lowest):
            lowest = np.nextafter(lowest, np.float32(np.inf))
        assert floor == key(lowest), f"top {top!r}, {row}"


def test_at_least_top_k_logits_reach_the_cut_and_all_of_them_lie_in_near_tiles(
    plan, sampling_batch, random_logits, target, seed
):
    vocab_size = 9001
    rng = np.random.default_rng(seed)
    top_ks = [1, 2, 50, 200, 400]
    logits = random_logits(rng, "normal", len(top_ks), vocab_size)
    plans = plan(logits, sampling_batch([{"top_k": top_k} for top_k in top_ks]))
    size = sampling_tile(vocab_size, target, 132).tile
    for row, top_k in enumerate(top_ks):
        keys = np.array([key(x) for x in logits[row]])
        reached = np.flatnonzero(keys >= int(plans.cut_key[row]))
        assert top_k <= len(reached) <= 3 * top_k
        near = plans.near_tiles[row, : plans.num_near[row]].tolist()
        assert near == sorted({int(token) // size for token in reached})
