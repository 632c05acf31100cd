"""Penalties, biases and masks against the reference, bit for bit."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.gpu.adjust import adjust_logits
from kernels.gpu.sampling_tiles import sampling_tile
from kernels.reference.sample import adjusted_logits, masked_logits
from tests.support.kernels.batches import assert_same_bits

INF = math.inf


def run(logits, batch, device, target, num_processors=132):
    tile = sampling_tile(logits.shape[1], target, num_processors)
    return adjust_logits(logits.to(device), batch.to(device), tile=tile)


def assert_adjusted(logits, batch, device, target, num_processors=132):
    result = run(logits, batch, device, target, num_processors)
    for row in range(len(logits)):
        want = masked_logits(adjusted_logits(logits[row], batch, row), batch, row)
        if result.is_adjusted[row]:
            assert_same_bits(result.adjusted[row].cpu() + 0.0, want + 0.0)
        else:
            assert_same_bits(logits[row], want)


@pytest.mark.sampled
@pytest.mark.parametrize("num_processors", [1, 132])
def test_rows_are_adjusted_as_by_the_reference(device, target, sampling_batch, seed, num_processors):
    """Histories exceed a program's block and have few different tokens, so programs meet the same token at once."""
    rng = np.random.default_rng(seed)
    vocab_size = 300
    rows = [
        {
            "prompt": rng.integers(0, rng.choice([2, 40, vocab_size]), rng.integers(1, 2500)).tolist(),
            "output": rng.integers(0, rng.choice([2, 40, vocab_size]), rng.integers(1, 2500)).tolist(),
            "repetition_penalty": float(np.float32(rng.choice([0.7, 1.0, 1.3]))),
            "presence_penalty": float(np.float32(rng.choice([0.0, -0.6, 1.1]))),
            "frequency_penalty": float(np.float32(rng.choice([0.0, -0.01, 0.3]))),
            "bias": {int(i): float(rng.choice([-INF, -100.0, 3.1])) for i in rng.integers(0, vocab_size, 90)},
        }
        for _ in range(4)
    ]
    rows += [row | {"allowed": rng.integers(0, vocab_size, 150).tolist()} for row in rows[:2]]
    rows += [{}, {"bias": {7: -INF, 8: 0.1}}, {"prompt": [3], "repetition_penalty": 1.5}, {"allowed": [5, 299]}]
    logits = torch.from_numpy(rng.standard_normal((len(rows), vocab_size)).astype(np.float32) * 5)
    logits[:, 11] = -INF
    assert_adjusted(logits, sampling_batch(rows), device, target, num_processors)


def test_the_sum_of_penalties_and_bias_is_rounded_once(device, target, sampling_batch):
    """2^24 + 1.5 - 2^24: a sum that is rounded in between loses the half."""
    row = {"output": [1], "presence_penalty": -(2.0**24) - 0.5, "bias": {1: -(2.0**24)}}
    logits = torch.tensor([[0.0, 1.0, 0.0]])
    assert run(logits, sampling_batch([row]), device, target).adjusted[0].tolist() == [0.0, 1.5, 0.0]


def test_biases_of_the_same_token_add_up(device, target, sampling_batch):
    """A request's bias and a ban on ending too early may meet; of tokens with penalties too, and more than a program
    compares at a time.
    """
    row = {"bias": dict.fromkeys(range(200), 0.5), "output": [*range(0, 100, 3)] * 2, "presence_penalty": 0.3}
    batch = sampling_batch([row, row | {"repetition_penalty": 1.7}])
    ids = torch.cat((torch.arange(100), torch.arange(100))).to(torch.int32).repeat(2)
    values = torch.linspace(-1, 1, 400)
    values[3] = -INF
    logits = torch.linspace(-4, 4, 500).view(2, 250)
    assert_adjusted(logits, replace(batch, bias_ids=ids, bias_values=values), device, target)


def test_nan_stays_nan(device, target, sampling_batch):
    """Also signalling NaNs with the bits of a mark."""
    logits = torch.zeros(1, 8)
    logits.view(torch.int32)[0, :4] = torch.tensor([0x7F800001, 0x7F800005, 0x7FC00000, 0x7F800002])
    batch = sampling_batch([{"output": [1, 2], "presence_penalty": 0.5, "bias": {3: 1.0}}])
    with np.errstate(invalid="ignore"):
        got = run(logits, batch, device, target).adjusted[0].cpu()
    assert got.isnan().tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("num_processors", [1, 132])
def test_rows_with_masks_alone_are_masked_and_others_not_copied(device, target, sampling_batch, seed, num_processors):
    """A vocabulary of two chunks that ends within a word."""
    vocab_size = 4096 + 77
    logits = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, vocab_size)).astype(np.float32))
    logits[1, 40] = math.nan
    batch = sampling_batch([{}, {"allowed": [0, 31, 32, 4095, 4096, vocab_size - 1]}, {"allowed": []}, {}])
    result = run(logits, replace(batch, any_penalised=False), device, target, num_processors)
    assert result.is_adjusted.tolist() == [0, 1, 1, 0]
    assert_same_bits(
        result.adjusted[1:3].cpu(),
        torch.stack(
            (
                torch.where(torch.isin(torch.arange(vocab_size), torch.tensor([0, 31, 32, 40, 4095, 4096, 4172])),
                            logits[1], -INF),
                torch.full((vocab_size,), -INF),
            )
        ),
    )  # fmt: skip


def test_nothing_is_copied_where_nothing_is_adjusted(device, target, sampling_batch):
    logits = torch.zeros(1, 8)
    batch = replace(sampling_batch([{"prompt": [1]}]), any_penalised=False)
    result = run(logits, batch, device, target)
    assert not result.any_adjusted
    assert result.raw is result.adjusted
