"""Statistics of traces and schedules, computed as in the tables of papers about published traces.

Rates are requests over span. Bins of the index of dispersion begin at the first arrival; the last, which the schedule
fills in part, is left out: as a low count it made a Poisson process of 100 s look like one of bursts. Deviations are
those of the population; percentiles interpolate linearly. What is undefined is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.trace.oracle import Reuse, ideal_reuse
from loadgen.trace.schema import Trace

BINS_S = (1, 10, 60)
PERCENTILES = (1, 25, 50, 75, 90, 95, 99)
_MIN_BINS = 5  # with fewer the variance of a bin is chance, and with one it is 0 whatever came
CONTEXTS_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)


class Burst(NamedTuple):
    """Arrivals per bin.

    Attributes:
        idc: index of dispersion, variance over mean: 1 for a Poisson process, 0 for a metronome.
        peak_to_mean: the fullest bin over the mean one.
    """

    idc: float
    peak_to_mean: float


@dataclass(frozen=True, slots=True)
class ArrivalStatistics:
    """A schedule.

    Attributes:
        count: requests.
        span_s: from the first to the last.
        mean_rate_rps: count / span_s; None if all arrive at once.
        gap_cv: coefficient of variation of the gaps; None with fewer than two requests or no time between them.
        distinct_times: different arrival times.
        zero_gap_share: gaps without time; None with fewer than two requests.
        bursts: by width of the bins in seconds; only widths of which the span holds five bins.
    """

    count: int
    span_s: float
    mean_rate_rps: float | None
    gap_cv: float | None
    distinct_times: int
    zero_gap_share: float | None
    bursts: Mapping[int, Burst]


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Lengths in tokens; `percentiles` by PERCENTILES."""

    sum: int
    mean: float
    min: int
    max: int
    percentiles: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """A trace.

    Attributes:
        arrivals: its schedule.
        input_tokens, output_tokens: its lengths.
        fitting: share of requests whose prompt and answer fit a context, by its tokens.
        reuse: what an infinite prefix cache gives; None if the trace does not say what prompts share.
        blocks, unique_blocks: of all prompts; 0 likewise.
    """

    arrivals: ArrivalStatistics
    input_tokens: LengthStatistics
    output_tokens: LengthStatistics
    fitting: Mapping[int, float]
    reuse: Reuse | None
    blocks: int
    unique_blocks: int


def statistics(trace: Trace) -> TraceStatistics:
    """All of a trace's statistics. The trace has at least one request."""
    total = trace.input_tokens + trace.output_tokens
    return TraceStatistics(
        arrivals=arrival_statistics(trace.arrival_s),
        input_tokens=length_statistics(trace.input_tokens),
        output_tokens=length_statistics(trace.output_tokens),
        fitting={context: float(np.mean(total <= context)) for context in CONTEXTS_TOKENS},
        reuse=None if trace.blocks is None else ideal_reuse(trace),
        blocks=0 if trace.blocks is None else len(trace.blocks.ids),
        unique_blocks=0 if trace.blocks is None else len(np.unique(trace.blocks.ids)),
    )


def arrival_statistics(arrival_s: NDArray[np.float64]) -> ArrivalStatistics:
    """Returns statistics of a schedule, or of the times at which requests were really sent.

    Args:
        arrival_s: [requests] float64, seconds, ascending, at least one.
    """
    gaps = np.diff(arrival_s)
    span_s = float(arrival_s[-1] - arrival_s[0])
    return ArrivalStatistics(
        count=len(arrival_s),
        span_s=span_s,
        mean_rate_rps=len(arrival_s) / span_s if span_s > 0 else None,
        gap_cv=float(gaps.std() / gaps.mean()) if span_s > 0 else None,
        distinct_times=len(np.unique(arrival_s)),
        zero_gap_share=float(np.mean(gaps == 0)) if len(gaps) else None,
        bursts={bin_s: _burst(arrival_s, bin_s) for bin_s in BINS_S if span_s >= _MIN_BINS * bin_s},
    )


def length_statistics(tokens: NDArray[np.int64]) -> LengthStatistics:
    """Of [requests] int64, at least one."""
    values = np.percentile(tokens, PERCENTILES)
    return LengthStatistics(
        sum=int(tokens.sum()),
        mean=float(tokens.mean()),
        min=int(tokens.min()),
        max=int(tokens.max()),
        percentiles=dict(zip(PERCENTILES, values.tolist(), strict=True)),
    )


def _burst(arrival_s: NDArray[np.float64], bin_s: int) -> Burst:
    bins, per_bin = np.unique((arrival_s - arrival_s[0]) // bin_s, return_counts=True)  # only those with arrivals
    num_bins = bins[-1]  # whole ones
    per_bin = per_bin[bins < num_bins]
    mean = per_bin.sum() / num_bins
    variance = np.sum(per_bin**2) / num_bins - mean**2
    return Burst(float(variance / mean), float(per_bin.max() / mean))
