import numpy as np
import pytest

from loadgen.arrivals import gamma
from loadgen.errors import OptionError
from loadgen.synthetic import (
    Lengths,
    choice,
    exponential,
    lognormal,
    random_requests,
    shared_prefix,
    uniform,
    with_arrivals,
)
from loadgen.trace.oracle import ideal_cached_tokens, ideal_reuse
from loadgen.trace.schema import Trace

RANDOM = np.random.default_rng


def prefixes(num_prefixes: int = 1, prefix_len: int = 1) -> Trace:
    lengths = choice(1)
    return shared_prefix(1, num_prefixes=num_prefixes, prefix_len=prefix_len, own_len=lengths, output_len=lengths)


def test_fixed_lengths_are_choice() -> None:
    trace = random_requests(5, choice(100), choice(7))
    assert trace.input_tokens.tolist() == [100] * 5
    assert trace.output_tokens.tolist() == [7] * 5
    assert trace.arrival_s.tolist() == [0.0] * 5
    assert trace.accounting.read == trace.accounting.kept == 5


def test_uniform_lengths_reach_both_ends_evenly() -> None:
    drawn = uniform(3, 6).sample(40_000, RANDOM(0))
    assert np.bincount(drawn)[3:] == pytest.approx([10_000] * 4, rel=0.05)
    assert set(drawn) == {3, 4, 5, 6}


def test_a_choice_is_even() -> None:
    drawn = choice(64, 256, 1024).sample(30_000, RANDOM(0))
    assert [np.sum(drawn == value) for value in (64, 256, 1024)] == pytest.approx([10_000] * 3, rel=0.05)


def test_lognormal_and_exponential_have_their_means() -> None:
    log = lognormal(512, 0.8).sample(200_000, RANDOM(0))
    assert log.mean() == pytest.approx(512, rel=0.01)
    assert np.log(log).std() == pytest.approx(0.8, rel=0.01)
    assert exponential(300).sample(200_000, RANDOM(0)).mean() == pytest.approx(300, rel=0.01)


def test_no_length_is_below_one() -> None:
    for lengths in (exponential(1), lognormal(1, 5)):
        assert lengths.sample(10_000, RANDOM(0)).min() == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: choice(0), r"lengths to choose from are \[0\]"),
        (lambda: choice(), r"lengths to choose from are \[\]"),
        (lambda: uniform(5, 4), "lengths from 5 to 4"),
        (lambda: uniform(0, 4), "lengths from 0 to 4"),
        (lambda: lognormal(0.5, 1), "log-normal lengths with mean 0.5"),
        (lambda: lognormal(5, 0), "sigma 0"),
        (lambda: exponential(0), "exponential lengths with mean 0"),
        (lambda: random_requests(0, choice(1), choice(1)), "number of requests is 0"),
        (
            lambda: shared_prefix(1, num_prefixes=0, prefix_len=1, own_len=choice(1), output_len=choice(1)),
            "number of prefixes is 0",
        ),
        (
            lambda: shared_prefix(1, num_prefixes=1, prefix_len=0, own_len=choice(1), output_len=choice(1)),
            "prefix length is 0",
        ),
        (
            lambda: shared_prefix(1, num_prefixes=10**20, prefix_len=1, own_len=choice(1), output_len=choice(1)),
            "number of prefixes is 1",
        ),
    ],
)
def test_values_out_of_range_are_named(make, message) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_the_seed_decides() -> None:
    same, again, other = (random_requests(50, uniform(1, 99), choice(3), seed=seed) for seed in (1, 1, 2))
    assert same.digest == again.digest != other.digest


def test_the_digest_is_the_same_on_every_schedule() -> None:
    requests = random_requests(3, choice(5), choice(5))
    timed = with_arrivals(requests, np.array([1.0, 2.0, 3.0]))
    assert timed.digest == requests.digest
    assert timed.arrival_s.tolist() == [1.0, 2.0, 3.0]


def test_random_requests_share_nothing() -> None:
    assert ideal_reuse(random_requests(100, uniform(1, 99), choice(3))).token_reuse == 0


@pytest.mark.parametrize(
    ("prefix_len", "own"), [(256, choice(256)), (7, uniform(1, 40)), (1000, choice(3)), (1, choice(5))]
)
def test_prefixes_and_nothing_else_are_shared(prefix_len, own) -> None:
    trace = shared_prefix(200, num_prefixes=6, prefix_len=prefix_len, own_len=own, output_len=choice(9), seed=3)
    first = [int(trace.blocks.of(index)[0]) for index in range(len(trace))]
    assert set(first) == set(range(6))
    assert len(np.unique(trace.blocks.ids)) == 6 + len(trace.blocks.ids) - 200
    expected = [prefix_len if prefix in first[:index] else 0 for index, prefix in enumerate(first)]
    assert ideal_cached_tokens(trace).tolist() == expected
    assert np.array_equal(np.diff(trace.blocks.offsets), -(-trace.input_tokens // trace.blocks.block_tokens))
    assert (trace.input_tokens > prefix_len).all()
    assert trace.output_tokens.tolist() == [9] * 200


@pytest.mark.parametrize("lengths", [exponential(500), lognormal(500, 1.0), uniform(1, 1000), choice(1, 1000)])
@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_do_not_depend_on_the_gaps_of_arrivals_with_the_same_seed(lengths: Lengths, seed: int) -> None:
    trace = random_requests(4000, lengths, lengths, seed=seed)
    gaps = np.diff(gamma(1.0, 4000, seed=seed), prepend=0.0)
    found = np.corrcoef([gaps, trace.input_tokens, trace.output_tokens])
    assert np.abs(found[np.triu_indices(3, 1)]).max() < 0.08  # five deviations of independent ones
