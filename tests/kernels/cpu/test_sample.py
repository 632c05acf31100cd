"""Sampling on CPUs against the reference, which sorts the vocabulary, and the distribution of the draws."""

import math
from dataclasses import replace

import numba
import numpy as np
import pytest
import torch

from kernels.cpu.sample import Sampler, _sample_rows, _sample_rows_on_all_threads, compile_sampler
from kernels.reference.sample import sample as reference_sample
from kernels.sampling import RowStatus
from tests.support.kernels.draws import distribution_error

INF = math.inf
sample = Sampler().sample


def _assert_equal(got, want):
    assert torch.equal(got.status, want.status)
    assert torch.equal(got.token_ids, want.token_ids)
    assert torch.equal(got.top_ids, want.top_ids)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(got.top_values, want.top_values, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("kind", ["normal", "ties", "forbidden", "flat"])
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 260, 3001])
def test_mixed_rows_are_sampled_as_by_the_reference(
    sampling_batch, random_sampling_row, random_logits, kind, vocab_size
):
    rng = np.random.default_rng(vocab_size)
    for _ in range(3):
        logits = random_logits(rng, kind, 48, vocab_size)
        batch = sampling_batch([random_sampling_row(rng, vocab_size) for _ in range(48)])
        _assert_equal(sample(logits, batch), reference_sample(logits, batch))


def test_a_batch_is_read_again_when_its_tensors_have_changed(sampling_batch, random_logits):
    """The engine keeps its views from step to step, and writes what they show."""
    logits = random_logits(np.random.default_rng(0), "normal", 4, 100)
    batch, other = sampling_batch([{"temperature": 0.0}] * 4), sampling_batch([{"temperature": 1.0, "seed": 3}] * 4)
    for _ in range(2):
        _assert_equal(sample(logits, batch), reference_sample(logits, batch))
        _assert_equal(sample(logits, other), reference_sample(logits, other))
    batch.temperature.fill_(5.0)
    batch.seed.fill_(11)
    _assert_equal(sample(logits, batch), reference_sample(logits, batch))


@pytest.mark.parametrize("value", [0.5, -0.0])
@pytest.mark.parametrize("place", [0, 511, 512, 1023, 1300])
def test_the_first_of_equal_largest_logits_wins_in_any_block(sampling_batch, value, place):
    logits = torch.full((1, 1301), -1.0)
    logits[0, place:] = value
    logits[0, place] = abs(value)
    assert sample(logits, sampling_batch([{"temperature": 0.0}])).token_ids.tolist() == [place]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, INF])
def test_invalid_row_fails_alone(sampling_batch, random_sampling_row, random_logits, bad):
    rng = np.random.default_rng(0)
    rows = [random_sampling_row(rng, 100) for _ in range(9)]
    logits = random_logits(rng, "normal", 9, 100)
    clean = sample(logits, sampling_batch(rows))
    broken = logits.clone()
    broken[4, 77] = bad
    got = sample(broken, sampling_batch(rows))
    assert got.status.tolist() == [0] * 4 + [RowStatus.BAD_LOGITS] + [0] * 4
    assert got.token_ids[4] == -1
    others = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    assert torch.equal(got.token_ids[others], clean.token_ids[others])


def test_rows_are_the_same_bits_alone_and_in_a_batch_on_any_number_of_threads(
    sampling_batch, random_sampling_row, random_logits
):
    rng = np.random.default_rng(1)
    rows = [random_sampling_row(rng, 500) | {"top_logprobs": 5} for _ in range(24)]
    logits = random_logits(rng, "normal", 24, 500)
    together = sample(logits, sampling_batch(rows))
    num_threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        alone = [sample(logits[i : i + 1], sampling_batch([row])) for i, row in enumerate(rows)]
    finally:
        numba.set_num_threads(num_threads)
    assert together.token_ids.tolist() == [int(one.token_ids[0]) for one in alone]
    assert torch.equal(together.logprobs, torch.cat([one.logprobs for one in alone]))
    assert torch.equal(together.top_values, torch.cat([one.top_values for one in alone]))


@pytest.mark.parametrize("num_rows", [1, 3000])
def test_no_row_compiles_a_kernel_after_start(sampling_batch, num_rows):
    compile_sampler()
    before = [list(kernel.signatures) for kernel in (_sample_rows, _sample_rows_on_all_threads)]
    logits = torch.randn(num_rows, 200, generator=torch.Generator().manual_seed(0))
    row = {"bias": {3: 5.0}, "prompt": [1, 2], "repetition_penalty": 2.0, "top_logprobs": 3}
    for more in ({}, {"allowed": [7, 9]}, {"forced": 4}, {"allowed": [7, 9], "forced": 4}):
        batch = sampling_batch([row | more] * num_rows)
        assert sample(logits, batch).status.eq(RowStatus.OK).all()
    assert [list(kernel.signatures) for kernel in (_sample_rows, _sample_rows_on_all_threads)] == before


def test_logits_are_not_changed(sampling_batch):
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sample(logits, sampling_batch([{"bias": {3: 5.0}, "prompt": [1, 2], "repetition_penalty": 2.0}, {"top_k": 3}]))
    assert torch.equal(logits, before)


@pytest.mark.sampled
@pytest.mark.parametrize("filters", [{}, {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02}], ids=str)
@pytest.mark.parametrize("varied", ["seed", "position"])
def test_draws_have_the_exact_distribution(sampling_batch, filters, varied):
    """Pearson's chi-square over 100,000 draws, each of another seed or another position of one seed.

    The draws are fixed, so the outcome is too. The least of 4 p-values of correct draws would be below the limit,
    0.001, for one of 250 choices of seeds; it is not for these.
    """
    vocab_size, num_draws, rows = 30, 100_000, 2000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(4))
    batch = sampling_batch([filters] * rows)
    tokens = []
    for start in range(0, num_draws, rows):
        batch = replace(batch, **{varied: torch.arange(start, start + rows)})
        tokens.append(sample(logits.expand(rows, -1).contiguous(), batch).token_ids.numpy())
    assert distribution_error(np.concatenate(tokens), logits, filters) < 3.1


def test_draws_at_neighbouring_positions_and_seeds_are_independent(sampling_batch):
    """The pairs (draw at n, draw at n + 1) over 16 equal tokens fill a 256-cell table evenly."""
    n = 20_000
    logits = torch.zeros(n, 16)
    for varied in ("seed", "position"):
        batch = replace(sampling_batch([{}] * n), **{varied: torch.arange(n)})
        tokens = sample(logits, batch).token_ids.numpy()
        counts = np.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256)
        chi_square = ((counts - (n - 1) / 256) ** 2).sum() / ((n - 1) / 256)
        assert chi_square < 255 + 4 * math.sqrt(2 * 255), varied


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}], ids=str)
def test_a_small_change_of_the_logits_rarely_changes_the_draw(sampling_batch, filters):
    """Gumbel noise belongs to the token, so a change of the logits by 1e-4 changes about that share of the draws.

    With an inverse CDF every boundary between two of these 2,000 tokens would move: it changed 105 of 40,000 draws,
    Gumbel-max 7.
    """
    generator = torch.Generator().manual_seed(0)
    n = 4000
    logits = torch.randn(2000, generator=generator).expand(n, -1).contiguous()
    batch = replace(sampling_batch([filters] * n), seed=torch.arange(n))
    moved = logits + 1e-4 * torch.randn(n, 2000, generator=generator)
    num_changed = int((sample(logits, batch).token_ids != sample(moved, batch).token_ids).sum())
    assert num_changed <= 4


@pytest.mark.parametrize("num_rows", [1, 200])
def test_token_ids_are_visible_during_the_draw(sampling_batch, num_rows):
    shown = []
    batch = sampling_batch([{"temperature": 0.0}] * num_rows)

    def show(token_ids):
        assert (token_ids == -1).all()
        shown.append(token_ids)

    drawn = sample(torch.arange(5000.0).expand(num_rows, -1).contiguous(), batch, show)
    assert len(shown) == 1
    assert (shown[0] == 4999).all()
    assert np.shares_memory(shown[0], drawn.token_ids.numpy())


def test_logits_that_no_kernel_is_compiled_for_are_refused(sampling_batch):
    """Numba would compile one at the first such call, for many seconds of a request."""
    batch = sampling_batch([{}] * 2)
    for logits in (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 16)[:, ::2], torch.zeros(8)):
        with pytest.raises(ValueError, match="expected whole rows in float32"):
            sample(logits, batch)
