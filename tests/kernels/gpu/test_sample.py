"""Sampling on GPUs against the reference; rows do not affect each other."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from kernels.gpu.sample import sample
from kernels.gpu.sampling_tiles import MAX_VOCAB_SIZE
from kernels.reference.philox import token_words
from kernels.reference.sample import adjusted_logits, kept_tokens, masked_logits
from kernels.reference.sample import sample as reference_sample
from kernels.sampling import RowStatus, SampledTokens
from tests.support.kernels.draws import distribution_error

INF = math.inf
LOGPROB_ERROR = 2e-6


@pytest.fixture(scope="module")
def many(device):
    """Factor by which tests on a GPU draw more than under the interpreter."""
    return 1 if device.type == "cpu" else 100


@pytest.fixture(scope="module")
def run(device, target):
    """run(logits, batch, num_processors=132): the GPU's sampler on tensors of the CPU."""

    def run(logits, batch, num_processors=132):
        on_device = logits.to(device)
        with np.errstate(over="ignore", invalid="ignore"):  # the interpreter computes with numpy
            result = sample(on_device, batch.to(device), target=target, num_processors=num_processors)
        assert torch.equal(on_device.cpu().view(torch.int32), logits.view(torch.int32)), "logits were changed"
        return SampledTokens(*(getattr(result, field.name).cpu() for field in fields(result)))

    return run


def score_gap(logits, batch, row, tokens):
    """Returns the difference between the scores of two kept tokens."""
    arguments = {name: getattr(batch, name)[row].item() for name in ("temperature", "top_k", "top_p", "min_p")}
    ids, d = kept_tokens(masked_logits(adjusted_logits(logits[row], batch, row), batch, row), **arguments)
    words = token_words(int(batch.seed[row]) % 2**64, int(batch.position[row]), ids.numpy())
    scores = dict(zip(ids.tolist(), d.numpy() - np.log(-np.log((words + 0.5) / 2**32)), strict=True))
    assert all(token in scores for token in tokens), f"row {row}: {tokens} are not both kept"
    return abs(scores[tokens[0]] - scores[tokens[1]])


def assert_sampled_alike(got, want, logits, batch):
    """Checks equality, except for tokens whose scores tie within a few ulp; returns the number of such rows."""
    assert torch.equal(got.status, want.status)
    differing = (got.token_ids != want.token_ids).nonzero().flatten().tolist()
    for row in differing:
        tokens = (int(got.token_ids[row]), int(want.token_ids[row]))
        gap = score_gap(logits, batch, row, tokens)
        assert gap < 1e-5, f"row {row}: {tokens} differ by {gap} in score"
    same = got.token_ids == want.token_ids
    assert torch.equal(got.top_ids, want.top_ids)
    close = {"rtol": 0, "atol": LOGPROB_ERROR, "equal_nan": True}
    torch.testing.assert_close(got.logprobs[same], want.logprobs[same], **close)
    torch.testing.assert_close(got.top_values, want.top_values, **close)
    return len(differing)


SIZES = [(vocab_size, kind) for vocab_size in (260, 3001) for kind in ("normal", "ties", "forbidden", "flat")]


@pytest.mark.sampled
@pytest.mark.parametrize(("vocab_size", "kind"), [(1, "normal"), (2, "forbidden"), (7, "ties"), *SIZES])
def test_mixed_rows_are_sampled_as_by_the_reference(
    run, many, sampling_batch, random_sampling_row, random_logits, seed, kind, vocab_size
):
    rng = np.random.default_rng(seed)
    num_rows = 8 * many
    logits = random_logits(rng, kind, num_rows, vocab_size)
    batch = sampling_batch([random_sampling_row(rng, vocab_size) for _ in range(num_rows)])
    num_ties = assert_sampled_alike(run(logits, batch), reference_sample(logits, batch), logits, batch)
    assert num_ties <= num_rows // 1000


def searched_rows(vocab_size):
    """Returns rows that few candidates do not decide: nearly all tokens are kept, or the row is flat."""
    return [
        {"top_p": 0.9, "temperature": 3.0},
        {"top_p": 0.3, "temperature": 100.0},
        {"top_k": vocab_size - 5},
        {"top_k": vocab_size - 5, "top_p": 0.7, "temperature": 2.0},
        {"top_k": 2500, "min_p": 0.001},
        {"top_p": 0.8, "min_p": 1e-6, "temperature": 4.0},
        {"top_p": 0.0},
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_rows_that_candidates_do_not_decide_are_searched(run, sampling_batch, random_logits, seed, kind):
    vocab_size = 5003
    rng = np.random.default_rng(seed)
    rows = [{**row, "seed": int(rng.integers(2**63))} for row in searched_rows(vocab_size)]
    logits = random_logits(rng, kind, len(rows), vocab_size)
    batch = sampling_batch(rows)
    assert assert_sampled_alike(run(logits, batch), reference_sample(logits, batch), logits, batch) == 0


def test_all_large_logits_may_lie_in_one_tile(run, sampling_batch):
    """The bound from the tiles' maxima excludes little in sorted logits and in a plateau of equal ones."""
    vocab_size = 9000
    logits = torch.stack(
        (torch.linspace(9, -9, vocab_size), torch.linspace(-9, 9, vocab_size), torch.zeros(vocab_size))
    )
    logits[2, 5000:] = 1.0
    batch = sampling_batch([{"top_k": 40, "top_p": 0.9, "top_logprobs": 20, "seed": i} for i in range(3)])
    want = reference_sample(logits, batch)
    assert assert_sampled_alike(run(logits, batch), want, logits, batch) == 0
    assert want.token_ids[2] in range(5000, 5040)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("vocab_size", [300, 9001])
def test_results_depend_neither_on_the_other_rows_nor_on_the_number_of_programs(
    run, sampling_batch, random_sampling_row, random_logits, seed, vocab_size
):
    rng = np.random.default_rng(seed)
    rows = [random_sampling_row(rng, vocab_size) | {"top_logprobs": 5} for _ in range(4)]
    rows[:2] = [row | {"temperature": 1.5, "top_k": 0, "top_p": 1.0} for row in rows[:2]]
    logits = random_logits(rng, "normal", len(rows), vocab_size)
    together = run(logits, sampling_batch(rows))
    for i in (0, 3):
        alone = run(logits[i : i + 1], sampling_batch([rows[i]]), num_processors=1 + i)
        for field in fields(SampledTokens):
            got, want = getattr(alone, field.name), getattr(together, field.name)[i : i + 1]
            assert torch.equal(got.view(torch.int8), want.view(torch.int8)), field.name


@pytest.mark.parametrize(("bad", "place"), [(math.nan, 0), (-math.nan, 2099), (INF, 77)])
def test_invalid_row_fails_alone(run, sampling_batch, random_sampling_row, random_logits, bad, place):
    rng = np.random.default_rng(0)
    rows = [random_sampling_row(rng, 2100) | {"top_logprobs": 2} for _ in range(3)]
    logits = random_logits(rng, "normal", 3, 2100)
    clean = run(logits, sampling_batch(rows))
    logits[1, place] = bad
    got = run(logits, sampling_batch(rows))
    assert got.status.tolist() == [0, RowStatus.BAD_LOGITS, 0]
    assert got.token_ids[1] == -1
    assert got.logprobs.isnan().tolist() == [False, True, False]
    assert got.top_ids[1].tolist() == [-1, -1]
    for name in ("token_ids", "logprobs", "top_ids", "top_values"):
        assert torch.equal(getattr(got, name)[::2], getattr(clean, name)[::2])


@pytest.mark.parametrize(
    ("logits", "row", "status"),
    [
        ([0.0, math.nan], {"prompt": [1], "repetition_penalty": 2.0, "bias": {1: -INF}}, RowStatus.BAD_LOGITS),
        ([3e38, 0.0], {"prompt": [0], "repetition_penalty": 0.1}, RowStatus.BAD_LOGITS),
        ([-INF, -INF], {"top_k": 1}, RowStatus.NO_CANDIDATE),
        ([1.0, 2.0], {"bias": {0: -INF, 1: -INF}, "temperature": 0.0}, RowStatus.NO_CANDIDATE),
        ([1.0, -INF], {"allowed": [1], "top_p": 0.5}, RowStatus.NO_CANDIDATE),
        ([0.0, math.nan], {"allowed": [0]}, RowStatus.BAD_LOGITS),
        ([3e38, 0.0], {"prompt": [0], "repetition_penalty": 0.1, "allowed": [1]}, RowStatus.BAD_LOGITS),
        ([0.0, math.nan], {"forced": 0}, RowStatus.BAD_LOGITS),
        ([0.0, 1.0], {"forced": 0, "allowed": []}, RowStatus.NO_CANDIDATE),
    ],
)
def test_rows_without_a_token_have_a_status(run, sampling_batch, logits, row, status):
    logits = torch.tensor([[1.0, 2.0], logits])
    got = run(logits, sampling_batch([{"temperature": 0.0}, {**row, "top_logprobs": 1}]))
    assert got.status.tolist() == [0, status]
    assert got.token_ids.tolist() == [1, -1]
    assert got.logprobs.isnan().all()


def test_greedy_takes_the_first_of_the_best(run, sampling_batch):
    logits = torch.zeros(3, 9000)
    logits[0, [70, 8000]] = 2.0
    logits[1, 8999] = 1e-45
    logits[2] = -torch.zeros(9000)
    logits[2, 5000] = 0.0
    batch = sampling_batch([{"temperature": 0.0}] * 3)
    assert run(logits, batch).token_ids.tolist() == [70, 8999, 0]
    assert run(logits, replace(batch, any_random=False, any_penalised=False)).token_ids.tolist() == [70, 8999, 0]


def test_hints_do_not_change_results(run, sampling_batch, random_logits):
    """Batches that need few kernels, with and without the host's hints that skip the others."""
    logits = random_logits(np.random.default_rng(3), "normal", 4, 4500)
    plain = sampling_batch([{"seed": i, "min_p": 0.01 * i} for i in range(4)])
    filtered = sampling_batch([{"seed": i, "top_k": 30, "top_p": 0.8} for i in range(4)])
    for batch, hints in ((plain, {"any_filtered": False}), (filtered, {})):
        want = run(logits, batch)
        assert torch.equal(run(logits, replace(batch, any_penalised=False, **hints)).token_ids, want.token_ids)


def test_more_alternatives_than_tiles_or_candidates(run, sampling_batch, random_logits):
    logits = random_logits(np.random.default_rng(5), "ties", 2, 5003)
    batch = sampling_batch([{"top_logprobs": 330}, {"top_logprobs": 1}])
    want = reference_sample(logits, batch)
    assert_sampled_alike(run(logits, batch), want, logits, batch)


def test_unsupported_inputs_are_rejected(run, sampling_batch, device):
    batch = sampling_batch([{}])
    with pytest.raises(ValueError, match="float64"):
        run(torch.zeros(1, 4, dtype=torch.float64).view(1, 4), batch)
    with pytest.raises(ValueError, match="strides"):
        run(torch.zeros(1, 8, device=device)[:, ::2], batch)
    with pytest.raises(ValueError, match=str(MAX_VOCAB_SIZE)):
        run(torch.zeros(1, MAX_VOCAB_SIZE + 1), batch)


@pytest.mark.sampled
@pytest.mark.parametrize("filters", [{}, {"temperature": 1.4, "top_k": 4, "top_p": 0.95, "min_p": 0.02}], ids=str)
def test_draws_have_the_exact_distribution(run, many, sampling_batch, seed, filters):
    """Pearson's chi-square with a limit that honest draws exceed once in a million runs.

    The interpreter draws few tokens; there the other tests compare them with those of the reference.
    """
    num_draws = 40 if many == 1 else 100_000
    logits = torch.tensor([0.1, 0.0, 0.4, -0.1, -INF, 0.2])
    batch = replace(sampling_batch([filters] * num_draws), seed=torch.arange(num_draws) + 1000 * seed)
    drawn = run(logits.expand(num_draws, -1).contiguous(), batch)
    assert distribution_error(drawn.token_ids.numpy(), logits, filters) < 4.8


@pytest.mark.gpu
def test_a_call_can_be_captured_and_never_waits_for_the_device(
    device, target, sampling_batch, random_sampling_row, random_logits, seed
):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    rng = np.random.default_rng(seed)
    batch = sampling_batch([random_sampling_row(rng, 40_000) for _ in range(16)])
    on_device = batch.to(device)
    logits = random_logits(rng, "normal", 16, 40_000).to(device)
    sample(logits, on_device, target=target, num_processors=132)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sample(logits, on_device, target=target, num_processors=132)
    for kind in ("ties", "normal"):
        logits.copy_(random_logits(rng, kind, 16, 40_000))
        torch.cuda.set_sync_debug_mode("error")
        want = sample(logits, on_device, target=target, num_processors=132)
        torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        assert torch.equal(result.token_ids, want.token_ids)
        assert torch.equal(result.top_ids, want.top_ids)
        assert_sampled_alike(
            SampledTokens(*(getattr(result, field.name).cpu() for field in fields(result))),
            reference_sample(logits.cpu(), batch),
            logits.cpu(),
            batch,
        )
