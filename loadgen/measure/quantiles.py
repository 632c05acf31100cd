"""Summaries of samples: plain, and weighted ones such as a gap that stands for several tokens.

Pure. Quantiles interpolate linearly between the neighbouring ranks, as numpy and vLLM's benchmark do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ALWAYS = (50.0, 99.0)
"""Percentiles every summary has, whatever was asked for."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of samples. Every figure of an empty one is NaN.

    Attributes:
        n: samples; of weighted ones the sum of weights, rounded.
        mean, std: the standard deviation is that of the samples themselves (no n - 1).
        min, max: smallest and largest.
        percentiles: (percentile, value), ascending; 50 and 99 are always among them.
    """

    n: int
    mean: float
    std: float
    min: float
    max: float
    percentiles: tuple[tuple[float, float], ...]

    def at(self, percentile: float) -> float:
        """The value of a percentile that was asked for.

        Raises: KeyError: it was not.
        """
        return dict(self.percentiles)[percentile]

    @property
    def p50(self) -> float:
        """The median."""
        return self.at(50.0)

    @property
    def p99(self) -> float:
        """99 of 100 are at most this."""
        return self.at(99.0)


def distribution(values: "Floats", percentiles: Sequence[float], weights: "Floats | None" = None) -> Distribution:
    """Summarizes samples; NaN ones are left out.

    Args:
        values: [samples] float64.
        percentiles: each 0..100.
        weights: [samples] float64, above 0: how many samples each stands for. They need not be whole numbers.
    """
    wanted = sorted({*ALWAYS, *(float(percentile) for percentile in percentiles)})
    known = ~np.isnan(values)
    if not known.all():
        values, weights = values[known], None if weights is None else weights[known]
    if len(values) == 0:
        return Distribution(0, math.nan, math.nan, math.nan, math.nan, tuple((p, math.nan) for p in wanted))
    mean = float(np.average(values, weights=weights))
    variance = float(np.average((values - mean) ** 2, weights=weights))
    return Distribution(
        n=len(values) if weights is None else round(float(weights.sum())),
        mean=mean,
        std=math.sqrt(variance),
        min=float(values.min()),
        max=float(values.max()),
        percentiles=tuple(zip(wanted, quantiles(values, [p / 100 for p in wanted], weights), strict=True)),
    )


def quantiles(values: "Floats", shares: Sequence[float], weights: "Floats | None" = None) -> list[float]:
    """Quantiles of samples, each counted as often as its weight says.

    With whole weights this is the quantile of the list in which every value stands weight times: between place
    h = share * (total - 1), rounded down, and the place after it, interpolated. Others follow from the same seen
    differently: lay the values side by side in ascending order, each as wide as its weight; the quantile is the mean
    height from h to h + 1.

    Args:
        values: [samples] float64, at least one, no NaN.
        shares: each 0..1.
        weights: [samples] float64, above 0; None counts each once.
    """
    if weights is None:
        return [float(value) for value in np.quantile(values, shares)]
    order = np.argsort(values, kind="stable")
    edges = np.concatenate(([0.0], np.cumsum(weights[order])))
    areas = np.concatenate(([0.0], np.cumsum(values[order] * weights[order])))
    width = min(1.0, float(edges[-1]))
    places = np.asarray(shares, dtype=np.float64) * (edges[-1] - width)
    means = (np.interp(places + width, edges, areas) - np.interp(places, edges, areas)) / width
    return [float(mean) for mean in np.clip(means, values.min(), values.max())]
