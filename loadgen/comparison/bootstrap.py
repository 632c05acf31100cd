"""Confidence intervals of differences between runs of one workload: blocks of requests are resampled, then repeats.

Pure. With repeats, pairs of runs are drawn, and the blocks within each pair anew, as for all nested data (Davison and
Hinkley 1997, section 3.8).
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from loadgen.comparison.resampling import MIN_BLOCKS, Sample, Statistic, replicates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

RESAMPLES = 10_000
CONFIDENCE = 0.95
Contrast = Literal["ratio", "difference"]
_UPPER = 0.5 + CONFIDENCE / 2
_Z = NormalDist().inv_cdf(_UPPER)


class Effect(NamedTuple):
    """Difference of the second runs from the first.

    Attributes:
        first, second: the statistic on each side; of several runs their mean (the geometric one for a ratio).
        value: second / first, or second - first.
        low, high: interval of 95 % confidence; NaN where there is none.
    """

    first: float
    second: float
    value: float
    low: float
    high: float


def effect(
    pairs: Sequence[tuple[Sample, Sample]],
    num_units: int,
    statistic: Statistic,
    contrast: Contrast,
    *,
    block_units: float = 1.0,
    resamples: int,
    seed: int = 0,
) -> Effect:
    """What changed from the first run of each pair to the second, with its interval.

    The percentile interval is stretched about the estimate for what a bootstrap does not see: by Student's t for the
    number of blocks (or of repeats, as far as they differ by more than the requests within them explain), and by the
    variance that is lost in drawing from a few. Blocks longer than a fifth of the run are cut to it, and t has the
    degrees of freedom of the uncut ones.

    Args:
        pairs: one for each repeat.
        num_units: of each run, at least 1.
        statistic: what to compare.
        contrast: a "ratio" needs figures above 0; else it is NaN.
        block_units: length of blocks that are independent of each other, see `block_length`.
        resamples: draws.
        seed: of the draws: the same input gives the same interval.
    """
    scale = _log if contrast == "ratio" else _same
    figures = np.array([[statistic.of(sample) for sample in pair] for pair in pairs])  # [repeats, 2]
    estimates = scale(figures[:, 1]) - scale(figures[:, 0])
    estimate = float(estimates.mean())
    if len(pairs) == 1:  # exactly as measured, not through a logarithm and back
        first, second = figures[0].tolist()
    else:
        first, second = (_back(float(scale(figures[:, side]).mean()), contrast) for side in (0, 1))
    if not math.isfinite(estimate):
        return Effect(first, second, math.nan, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    drawn = np.stack(
        [
            replicates(pair, num_units, statistic, scale, block_units=block_units, resamples=resamples, rng=rng)
            for pair in pairs
        ]
    )
    value = _back(estimate, contrast)
    if not np.isfinite(drawn).all():
        return Effect(first, second, value, math.nan, math.nan)
    drawn, stretch = _over_repeats(drawn, estimates, num_units / block_units, rng)
    low, high = (
        _back(estimate + stretch * (float(end) - estimate), contrast)
        for end in np.quantile(drawn, [1 - _UPPER, _UPPER])
    )
    return Effect(first, second, value, low, high)


def student_t(degrees: float) -> float:
    """Two-sided critical value of Student's t at CONFIDENCE, from one degree of freedom on, also between whole ones.

    Exact for 1 and 2; above, the expansion of Abramowitz and Stegun 26.7.5, off by 0.2 % at 3 and ever less.
    """
    whole = int(degrees)
    share = degrees - whole
    above = 0.0 if share == 0 else share * _whole_student_t(whole + 1)
    return (1 - share) * _whole_student_t(whole) + above


def _over_repeats(
    drawn: "Floats", estimates: "Floats", blocks: float, rng: np.random.Generator
) -> tuple["Floats", float]:
    """Returns draws of the mean over repeats, [resamples], and the factor by which their spread is widened."""
    repeats, resamples = drawn.shape
    within_degrees = repeats * max(1.0, blocks - 1)
    if repeats == 1:
        return drawn[0], student_t(within_degrees) / _Z / math.sqrt(1 - min(1 / blocks, 1 / MIN_BLOCKS))
    chosen = rng.integers(0, repeats, (resamples, repeats))
    draw = np.stack([rng.permutation(resamples) for _ in range(repeats)], axis=1)
    nested = drawn[chosen, draw].mean(axis=1)
    # Degrees of freedom by Satterthwaite (1946): few where repeats differ by more than the requests within explain.
    # On simulated A/A pairs 95 % intervals of 3, 5 and 8 repeats covered 1 in 93-100 %, whether or not runs differ.
    within = float(drawn.var(axis=1).mean()) / repeats
    between = max(0.0, float(estimates.var(ddof=1)) / repeats - within)
    if within + between == 0:
        return nested, 1.0
    degrees = (within + between) ** 2 / (between**2 / (repeats - 1) + within**2 / within_degrees)
    return nested, student_t(max(degrees, repeats - 1.0)) / _Z * math.sqrt(repeats / (repeats - 1))


def _whole_student_t(degrees: int) -> float:
    if degrees == 1:
        return math.tan(math.pi * (_UPPER - 0.5))
    if degrees == 2:
        return (2 * _UPPER - 1) / math.sqrt(2 * _UPPER * (1 - _UPPER))
    z, v = _Z, degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def _log(values: "Floats") -> "Floats":
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(np.where(values > 0, values, np.nan))


def _same(values: "Floats") -> "Floats":
    return values


def _back(value: float, contrast: Contrast) -> float:
    return math.exp(value) if contrast == "ratio" else value
