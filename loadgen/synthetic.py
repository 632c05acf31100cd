"""Made-up data sets as traces: lengths and shared prefixes drawn from distributions, arrivals from `loadgen.arrivals`.

Pure: seeded numbers in, a Trace out. Where prompts share a beginning they say so in blocks, so the oracle knows what a
prefix cache can give; where they do not, every prompt is its own.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import OptionError
from loadgen.trace.formats import MAX_TOKENS
from loadgen.trace.schema import Accounting, Blocks, Trace, workload_digest

Kind = Literal["choice", "uniform", "lognormal", "exponential"]
Integers = NDArray[np.int64]

MAX_REQUESTS = 5_000_000  # as of a model of traffic, see `loadgen.trace.servegen`
_STREAM = 0x1E46784  # the seed alone would draw lengths from the same numbers as `loadgen.arrivals` draws gaps


class Lengths(NamedTuple):
    """How long prompts or answers are, in tokens.

    Attributes:
        kind: any of the values with equal chance; uniform from the first to the second, both included; log-normal with
            mean and sigma of the logarithm; exponential with a mean.
        values: what the kind needs.
    """

    kind: Kind
    values: tuple[float, ...]

    def sample(self, count: int, random: np.random.Generator) -> Integers:
        """[count] int64, at least 1 each."""
        drawn: NDArray[np.float64] | NDArray[np.int64]
        if self.kind == "choice":
            drawn = random.choice(np.array(self.values), count)
        elif self.kind == "uniform":
            drawn = random.integers(int(self.values[0]), int(self.values[1]), count, endpoint=True)
        elif self.kind == "lognormal":
            mean, sigma = self.values
            drawn = random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        else:
            drawn = random.exponential(self.values[0], count)
        return np.clip(np.rint(drawn), 1, MAX_TOKENS).astype(np.int64)


def choice(*tokens: int) -> Lengths:
    """One of these, each as likely as the others. Raises: OptionError: none, or one out of range."""
    if not tokens or not 1 <= min(tokens) <= max(tokens) <= MAX_TOKENS:
        raise OptionError(
            f"lengths to choose from are {list(tokens)} tokens, must be at least one, each 1 to {MAX_TOKENS}"
        )
    return Lengths("choice", tokens)


def uniform(low: int, high: int) -> Lengths:
    """From low to high, both included. Raises: OptionError: low is below 1 or above high, or high above MAX_TOKENS."""
    if not 1 <= low <= high <= MAX_TOKENS:
        raise OptionError(
            f"lengths from {low} to {high} tokens, must begin at 1 or more, not end before they begin, and end at most "
            f"at {MAX_TOKENS}"
        )
    return Lengths("uniform", (low, high))


def lognormal(mean: float, sigma: float) -> Lengths:
    """With this mean, and this deviation of the logarithm. Raises: OptionError: out of range."""
    if not (1 <= mean <= MAX_TOKENS and 0 < sigma <= 5):
        raise OptionError(f"log-normal lengths with mean {mean:g}, sigma {sigma:g}: at least 1 token, above 0 to 5")
    return Lengths("lognormal", (mean, sigma))


def exponential(mean: float) -> Lengths:
    """With this mean. Raises: OptionError: below 1."""
    if not 1 <= mean <= MAX_TOKENS:
        raise OptionError(f"exponential lengths with mean {mean:g} tokens, must be at least 1")
    return Lengths("exponential", (mean,))


def random_requests(count: int, input_len: Lengths, output_len: Lengths, *, seed: int = 0) -> Trace:
    """Requests that share nothing, all due at 0.

    Args:
        count: requests, at least 1.
        input_len, output_len: lengths of prompts and answers.
        seed: of the lengths.
    Raises: OptionError: a value out of range.
    """
    random = np.random.default_rng((seed, _STREAM))
    input_tokens = input_len.sample(_checked(count), random)
    return _trace("random", input_tokens, output_len.sample(count, random), None)


def shared_prefix(
    count: int,
    *,
    num_prefixes: int,
    prefix_len: int,
    own_len: Lengths,
    output_len: Lengths,
    seed: int = 0,
) -> Trace:
    """Requests that each begin with one of some prefixes, chosen with equal chance, and go on alone; all are due at 0.

    Args:
        count: requests, at least 1.
        num_prefixes: different prefixes, 1 to MAX_TOKENS.
        prefix_len: tokens of each, 1 to MAX_TOKENS; also the tokens of a block.
        own_len: of what follows the prefix, at least a token.
        output_len: of answers.
        seed: of lengths and choice.
    Raises: OptionError: a value out of range.
    """
    for name, value in (("number of prefixes", num_prefixes), ("prefix length", prefix_len)):
        if not 1 <= value <= MAX_TOKENS:
            raise OptionError(f"{name} is {value}, must be 1 to {MAX_TOKENS}")
    random = np.random.default_rng((seed, _STREAM))
    own_tokens = own_len.sample(_checked(count), random)
    output_tokens = output_len.sample(count, random)
    per_request = 1 + -(-own_tokens // prefix_len)
    offsets = np.concatenate(([0], np.cumsum(per_request)))
    ids = num_prefixes + np.arange(offsets[-1], dtype=np.int64)  # everybody's own, but for the first of each
    ids[offsets[:-1]] = random.integers(0, num_prefixes, count)
    return _trace("shared-prefix", prefix_len + own_tokens, output_tokens, Blocks(ids, offsets, prefix_len))


def with_arrivals(trace: Trace, arrival_s: NDArray[np.float64]) -> Trace:
    """The same requests on another schedule: [requests] float64, seconds, ascending."""
    assert len(arrival_s) == len(trace), f"{len(arrival_s)} arrivals for {len(trace)} requests"
    return replace(trace, arrival_s=arrival_s)


def _trace(name: str, input_tokens: Integers, output_tokens: Integers, blocks: Blocks | None) -> Trace:
    count = len(input_tokens)
    trace = Trace(
        name=name,
        format="synthetic",
        digest="",
        arrival_s=np.zeros(count),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        rows=np.arange(count),
        accounting=Accounting(count),
        blocks=blocks,
    )
    return replace(trace, digest=workload_digest(trace))  # of the requests: the same at every rate


def _checked(count: int) -> int:
    if count < 1:
        raise OptionError(f"number of requests is {count}, must be at least 1")
    return count
