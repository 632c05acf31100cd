"""Compares two or more runs of one workload: what differs, by how much, and whether it could be chance.

Pure. The first side is the one that others are measured against.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadgen.comparison.bootstrap import RESAMPLES
from loadgen.comparison.comparable import Side, check_comparable
from loadgen.comparison.contrasts import (
    LATENCIES,
    Compared,
    compare_attainment,
    compare_latency,
    compare_tokens,
    due,
    measured,
)
from loadgen.measure.metrics import MeasureOptions
from loadgen.trace.schema import workload_digest

__all__ = ["Comparison", "Side", "Versus", "compare"]


@dataclass(frozen=True, slots=True)
class Versus:
    """One side against the first.

    Attributes:
        label: of the side.
        requests: due in the part that is measured.
        paired: of them, those that were answered in all runs of both sides. Latencies are of these.
        steady: whether that part is the steady state of all runs, else it is all of each.
        figures: what was compared.
    """

    label: str
    requests: int
    paired: int
    steady: bool
    figures: tuple[Compared, ...]

    def figure(self, key: str) -> Compared:
        """One of them, by its key.

        Raises: KeyError: there is none.
        """
        return {one.key: one for one in self.figures}[key]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All sides against the first.

    Attributes:
        baseline: label of the first.
        repeats: runs of each side.
        versus: the others, in order.
        digest: of the workload.
        options: what was measured.
        resamples: draws behind each interval.
        problems: why these should not be compared; empty unless forced.
    """

    baseline: str
    repeats: int
    versus: tuple[Versus, ...]
    digest: str
    options: MeasureOptions
    resamples: int
    problems: tuple[str, ...]


def compare(
    sides: Sequence[Side],
    options: MeasureOptions | None = None,
    *,
    force: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compares runs of one workload, request by request.

    Args:
        sides: at least two, with as many runs each; run k of one is paired with run k of the others.
        options: warm-up and limits; None takes the defaults.
        force: compare although workloads differ or a run is INVALID; the comparison says so.
        resamples: draws behind each interval.
        seed: of the draws.

    Raises: ComparisonError: see `check_comparable`.
    """
    options = options or MeasureOptions()
    problems = check_comparable(sides, force=force)
    first, *others = sides
    of_servers = not problems and len(first.runs) > 1
    return Comparison(
        baseline=first.label,
        repeats=len(first.runs),
        versus=tuple(_versus(first, other, options, resamples, seed, of_servers) for other in others),
        digest=workload_digest(first.runs[0].workload),
        options=options,
        resamples=resamples,
        problems=problems,
    )


def _versus(first: Side, other: Side, options: MeasureOptions, resamples: int, seed: int, of_servers: bool) -> Versus:
    runs = measured([*first.runs, *other.runs], options)
    pairs = list(zip(runs[: len(first.runs)], runs[len(first.runs) :], strict=True))
    asked = np.logical_and.reduce([due(one) for one in runs])
    chosen = asked & np.logical_and.reduce([one.samples.completed for one in runs])
    figures = (
        *(compare_latency(figure, pairs, chosen, resamples, seed) for figure in LATENCIES),
        compare_tokens(pairs, resamples, seed),
        compare_attainment(pairs, options, resamples, seed),
    )
    return Versus(
        label=other.label,
        requests=int(asked.sum()),
        paired=int(chosen.sum()),
        steady=runs[0].span.steady,
        figures=tuple(replace(figure, of_servers=of_servers) for figure in figures),
    )
