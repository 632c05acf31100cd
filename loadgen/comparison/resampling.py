"""Bootstrap of a figure: the run is resampled many times from blocks of its own units.

Pure. What happened in a run lies in a row of units: requests in order, or moments in time. Its ends are joined
(circular blocks: Politis and Romano 1992). Both runs of a pair are drawn with the same blocks, so that what comes from
the requests themselves (long prompts, bursts) falls out of the contrast.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.measure.quantiles import quantiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

MIN_BLOCKS = 5
"""A run is never drawn from fewer: longer blocks are cut to a fifth of it."""
# 10,000 draws of 1,000 units and 512 values are a product of 5 GFLOP: 0.2 s on two cores. More requests are drawn in
# groups of close values, more values are rounded; both are far below what an interval shows.
_UNITS = 1000
_VALUES = 512
_DRAWN_AT_ONCE = 2000


class Sample(NamedTuple):
    """What was measured in one run.

    Attributes:
        values: [samples] float64, no NaN.
        unit: [samples] int64, the unit each belongs to, from 0.
        weights: [samples] float64, how many each stands for; None is one.
    """

    values: "Floats"
    unit: "Integers"
    weights: "Floats | None" = None


@dataclass(frozen=True, slots=True)
class Statistic:
    """Statistic of a sample: a quantile, or the mean.

    Attributes:
        share: of the quantile, 0..1; None is the mean.
    """

    share: float | None = None

    def of(self, sample: Sample) -> float:
        """Returns the exact figure; NaN of an empty sample."""
        if len(sample.values) == 0:
            return math.nan
        if self.share is None:
            return float(np.average(sample.values, weights=sample.weights))
        return quantiles(sample.values, [self.share], sample.weights)[0]


def draw_blocks(num_units: int, block_units: int, count: int, rng: np.random.Generator) -> "NDArray[np.float32]":
    """Returns how often each unit was drawn, [count, num_units]: whole blocks, as many as fill the row."""
    blocks = -(-num_units // block_units)
    starts = rng.integers(0, num_units, (count, blocks)) + np.arange(count)[:, None] * num_units
    begun = np.bincount(starts.ravel(), minlength=count * num_units).reshape(count, num_units)
    around = np.concatenate([begun[:, num_units - block_units + 1 :], begun], axis=1)
    running = np.cumsum(np.concatenate([np.zeros((count, 1), dtype=np.int64), around], axis=1), axis=1)
    times: NDArray[np.float32] = (running[:, block_units:] - running[:, :-block_units]).astype(np.float32)
    return times


def replicates(
    pair: tuple[Sample, Sample],
    num_units: int,
    statistic: Statistic,
    scale: "Callable[[Floats], Floats]",
    *,
    block_units: float,
    resamples: int,
    rng: np.random.Generator,
) -> "Floats":
    """Returns the resampled contrast, [resamples] float64: scale(second) - scale(first) in each draw of both.

    Values are rounded where there are many; the shift that this gives the undrawn figures is taken off again.
    """
    group = -(-num_units // _UNITS)
    groups = -(-num_units // group)
    block = min(max(1, math.ceil(block_units / group)), max(1, groups // MIN_BLOCKS))
    grids = [_grid(sample, statistic.share) for sample in pair]
    tables = [_table(sample, group, groups, grid) for sample, grid in zip(pair, grids, strict=True)]
    exact = scale(np.array([statistic.of(sample) for sample in pair]))

    def contrast(draws: "NDArray[np.float32]") -> "Floats":
        first, second = (
            scale(_read(draws @ table, grid, statistic)) for table, grid in zip(tables, grids, strict=True)
        )
        return second - first

    shift = float(contrast(np.ones((1, groups), dtype=np.float32))[0]) - float(exact[1] - exact[0])
    return np.concatenate([contrast(draw_blocks(groups, block, count, rng)) - shift for count in _portions(resamples)])


def _grid(sample: Sample, share: float | None) -> "Floats | None":
    """The values that a sample is rounded up to, ascending: all that occur, or some of them; None for a mean.

    They lie the denser the nearer they are to the quantile, so that rounding is a twentieth of any deviation from it,
    and at the same shares on both sides, so that it falls out where both are alike.
    """
    if share is None:
        return None
    values = np.unique(sample.values)
    if len(values) <= _VALUES:
        return values
    away = np.geomspace(1e-6, 1.0, _VALUES // 2)
    shares = np.unique(np.clip(np.concatenate([share - away, [share], share + away]), 0.0, 1.0))
    return np.unique(quantiles(sample.values, shares.tolist(), sample.weights))


def _table(sample: Sample, group: int, groups: int, grid: "Floats | None") -> "NDArray[np.float32]":
    """[groups, columns]: the weight of each value of the grid in each group of units; without one, sum and weight."""
    of_group = sample.unit // group
    weights = np.ones(len(sample.values)) if sample.weights is None else sample.weights
    if grid is None:
        sums = [np.bincount(of_group, weights * part, minlength=groups) for part in (sample.values, 1.0)]
        return np.stack(sums, axis=1).astype(np.float32)
    column = np.minimum(np.searchsorted(grid, sample.values), len(grid) - 1)
    cells = np.bincount(of_group * len(grid) + column, weights, minlength=groups * len(grid))
    return cells.reshape(groups, len(grid)).astype(np.float32)


def _read(sums: "NDArray[np.float32]", grid: "Floats | None", statistic: Statistic) -> "Floats":
    """[draws] float64: the statistic of each draw; NaN of an empty one."""
    if grid is None or statistic.share is None:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(sums[:, 0].astype(np.float64) / sums[:, 1])
    if len(grid) == 0:
        return np.full(len(sums), np.nan)
    running = np.cumsum(sums, axis=1, dtype=np.float64)
    total = running[:, -1]
    place = (running < (statistic.share * total * (1 - 1e-9))[:, None]).sum(axis=1)
    return np.where(total > 0, grid[np.minimum(place, len(grid) - 1)], np.nan)


def _portions(resamples: int) -> Iterator[int]:
    for done in range(0, resamples, _DRAWN_AT_ONCE):
        yield min(_DRAWN_AT_ONCE, resamples - done)
