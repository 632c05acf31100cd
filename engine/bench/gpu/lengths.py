"""Lengths of prompts and answers: fixed pairs, and samples with the spread of public traces.

Pure. Samples are log-normal, clipped and scaled to the means of the traces; `--trace` uses a real one.
"""

import csv
import gzip
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.bench.floor import Length

_SAMPLE = 4096


class Spread(NamedTuple):
    """A log-normal distribution of whole tokens.

    Attributes:
        mean: mean of the sample, after clipping.
        sigma: standard deviation of the logarithm before clipping.
        most: longest length.
    """

    mean: float
    sigma: float
    most: int

    def sample(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Draws [count] lengths from 1 to `most` whose mean is `mean` within half a token."""
        drawn = random.lognormal(0.0, self.sigma, count)
        low, high = 0.0, 64.0 * self.mean
        for _ in range(64):  # clipping changes the mean: find the factor that restores it
            factor = (low + high) / 2
            lengths = np.clip(np.rint(factor * drawn), 1, self.most)
            low, high = (factor, high) if lengths.mean() < self.mean else (low, factor)
        return lengths.astype(np.int64)


SHAREGPT_LIKE = (Spread(202, 1.1, 1024), Spread(179, 1.0, 1024))
"""ShareGPT's first thousand prompts as serving benchmarks cut them: 202 tokens in, 179 out on average."""

AZURE_LIKE = (Spread(1155, 0.75, 8192), Spread(211, 0.95, 1000))
"""Azure's conversations of 2023: means 1,155 and 211, medians 1,020 and 129, 99th percentiles 4,142 and 601; the
samples' medians are about 880 and 135.
"""


def sample_lengths(spreads: tuple[Spread, Spread], count: int = _SAMPLE, *, seed: int = 0) -> tuple[Length, ...]:
    """Draws prompts and answers independently."""
    random = np.random.default_rng(seed)
    prompts, outputs = (spread.sample(count, random) for spread in spreads)
    return tuple(map(Length, prompts.tolist(), outputs.tolist()))


def scaled(lengths: Sequence[Length], factor: float) -> tuple[Length, ...]:
    """Scales every length, to at least 1, for a small model."""
    return tuple(Length(*(max(1, round(factor * tokens)) for tokens in length)) for length in lengths)


def trace_lengths(path: Path) -> tuple[Length, ...]:
    """Reads the lengths of a trace in Azure's format (`ContextTokens`, `GeneratedTokens`), plain or gzipped.

    Raises: ValueError: a column is missing, or a length is below 1.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = csv.DictReader(file)
        try:
            lengths = tuple(Length(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: needs columns ContextTokens and GeneratedTokens of whole numbers") from error
    if not lengths or min(map(min, lengths)) < 1:
        raise ValueError(f"{path}: has no requests, or one without tokens")
    return lengths


def in_progress(lengths: Sequence[Length], count: int, *, seed: int = 0) -> tuple[Length, ...]:
    """Returns a snapshot of running requests in steady state: long answers are more frequent, each at a random point of
    its answer. Tokens generated so far count as prompt.
    """
    random = np.random.default_rng(seed)
    outputs = np.array([length.output for length in lengths], dtype=np.float64)
    chosen = random.choice(len(lengths), count, p=outputs / outputs.sum())
    found = []
    for index, progress in zip(chosen.tolist(), random.random(count).tolist(), strict=True):
        prompt, output = lengths[index]
        done = min(output - 1, math.floor(progress * output))
        found.append(Length(prompt + done, output - done))
    return tuple(found)


def mean_length(lengths: Sequence[Length]) -> tuple[float, float]:
    """Returns the mean length of prompts and of answers."""
    return sum(p for p, _ in lengths) / len(lengths), sum(o for _, o in lengths) / len(lengths)
