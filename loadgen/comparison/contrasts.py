"""The figures in which two sides are compared: samples of both, paired by request, with an interval.

Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from loadgen.comparison.block_length import block_length
from loadgen.comparison.bootstrap import Contrast, Effect, effect
from loadgen.comparison.resampling import Sample, Statistic
from loadgen.measure.goodput import judged, keeps
from loadgen.measure.metrics import MeasureOptions
from loadgen.measure.samples import Samples, samples_of
from loadgen.measure.steady_state import Span, steady_span, whole_run
from loadgen.record import RunData

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

MIN_REQUESTS = 20
_BEYOND = 5
"""Samples that a tail figure needs beyond it: 500 for a p99."""
_EPISODES = 4
"""Separate stretches of requests in which they have to lie. On simulated queues at 90 % load, where a p99 rests on one
or two bursts, its interval covered the truth in no more than 70 % of the trials."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure on both sides.

    Attributes:
        key: as in comparison.json, such as "ttft_p99".
        name: in reports.
        unit: "ms", "tokens/s" or "share".
        contrast: whether `effect.value` is a ratio or a difference.
        better: which direction is.
        effect: the figures and the interval.
        block: length of the blocks that were drawn, in requests, or in moments for tokens/s.
        note: why there is no interval, or a caveat.
        of_servers: what differs may be said of the servers; otherwise only of the runs that are at hand, as where one
            run stands for each side or one should not have been compared.
    """

    key: str
    name: str
    unit: Literal["ms", "tokens/s", "share"]
    contrast: Contrast
    better: Literal["lower", "higher"]
    effect: Effect
    block: float
    note: str = ""
    of_servers: bool = True

    @property
    def judged(self) -> bool:
        """There is an interval."""
        return not math.isnan(self.effect.low)

    @property
    def significant(self) -> bool:
        """There is an interval, and it excludes "the same"."""
        same = 1.0 if self.contrast == "ratio" else 0.0
        return self.judged and not self.effect.low <= same <= self.effect.high


class MeasuredRun(NamedTuple):
    """A run, its columns, and the part of it that is measured."""

    run: RunData
    samples: Samples
    span: Span


def measured(runs: Sequence[RunData], options: MeasureOptions) -> tuple[MeasuredRun, ...]:
    """All runs, measured over the same kind of part: the steady state if all have one, else the whole run."""
    columns = [samples_of(run) for run in runs]
    spans = [
        steady_span(samples, warmup_s=options.warmup_s, ended_s=run.ended_s, interrupted=run.interrupted)
        for run, samples in zip(runs, columns, strict=True)
    ]
    if not all(span.steady for span in spans):
        spans = [whole_run(run.ended_s) for run in runs]
    return tuple(MeasuredRun(*one) for one in zip(runs, columns, spans, strict=True))


def due(one: MeasuredRun) -> "Flags":
    """[requests] bool: due in the part that is measured."""
    return one.span.holds(one.samples.scheduled_s) if one.span.steady else np.ones(len(one.run.requests), np.bool_)


class Figure(NamedTuple):
    """The latencies to compare. `alike` names the column whose autocorrelation decides the length of the blocks."""

    key: str
    name: str
    column: str
    statistic: Statistic
    alike: str


_P50, _P99, _MEAN = Statistic(0.5), Statistic(0.99), Statistic()
LATENCIES = (
    Figure("ttft_p50", "TTFT p50", "ttft", _P50, "ttft"),
    Figure("ttft_p99", "TTFT p99", "ttft", _P99, "ttft"),
    Figure("tpot_p50", "TPOT p50", "tpot", _P50, "tpot"),
    Figure("tpot_p99", "TPOT p99", "tpot", _P99, "tpot"),
    Figure("itl_p50", "ITL p50", "itl", _P50, "tpot"),
    Figure("itl_p99", "ITL p99", "itl", _P99, "max_itl"),
    Figure("e2e_p50", "E2E p50", "e2e", _P50, "e2e"),
    Figure("e2e_p99", "E2E p99", "e2e", _P99, "e2e"),
    Figure("normalized_mean", "Normalized latency mean", "normalized", _MEAN, "normalized"),
    Figure("normalized_p99", "Normalized latency p99", "normalized", _P99, "normalized"),
)


def compare_latency(
    figure: Figure, pairs: Sequence[tuple[MeasuredRun, MeasuredRun]], chosen: "Flags", resamples: int, seed: int
) -> Compared:
    """One latency over the chosen requests, [requests] bool: those that were answered in all runs."""
    rank = np.cumsum(chosen) - 1
    both = [
        (_sample(figure.column, first.samples, chosen, rank), _sample(figure.column, second.samples, chosen, rank))
        for first, second in pairs
    ]
    series = [series for pair in pairs for series in _series(*(getattr(p.samples, figure.alike)[chosen] for p in pair))]
    block = block_length(series)
    count = int(chosen.sum())
    note = _why_not(figure.statistic, both, count, block)
    result = effect(both, max(count, 1), figure.statistic, "ratio", block_units=block, resamples=resamples, seed=seed)
    if note:
        result = result._replace(low=math.nan, high=math.nan)
    elif math.isnan(result.low):
        note = "no interval: too few answers have this figure"
    elif block > count / 5:
        note = f"wanders: stretches of {block:.0f} of {count} requests are alike, so the interval is wide; run longer"
    return Compared(figure.key, figure.name, "ms", "ratio", "lower", result, block, note)


def compare_tokens(pairs: Sequence[tuple[MeasuredRun, MeasuredRun]], resamples: int, seed: int) -> Compared:
    """Output tokens per second, in intervals of about a second."""
    shortest_s = min(one.span.duration_s for pair in pairs for one in pair)
    moments = int(np.clip(round(shortest_s), 20, 1000))
    rates = [tuple(_token_rates(one, moments) for one in pair) for pair in pairs]
    unit = np.arange(moments)
    block = block_length([series for pair in rates for series in (*pair, pair[1] - pair[0])])
    result = effect(
        [(Sample(first, unit), Sample(second, unit)) for first, second in rates],
        moments, _MEAN, "ratio", block_units=block, resamples=resamples, seed=seed,
    )  # fmt: skip
    return Compared("output_tokens_per_s", "Output tokens per s", "tokens/s", "ratio", "higher", result, block)


def compare_attainment(
    pairs: Sequence[tuple[MeasuredRun, MeasuredRun]], options: MeasureOptions, resamples: int, seed: int
) -> Compared:
    """Share of the offered requests that kept every limit; without limits, that were answered."""
    runs = [one for pair in pairs for one in pair]
    offered = np.logical_and.reduce([due(one) & judged(one.run, one.samples, options.slo) for one in runs])
    good = [tuple(_good(one.samples, options)[offered] for one in pair) for pair in pairs]
    count = int(offered.sum())
    block = block_length([series for pair in good for series in (*pair, pair[1] - pair[0])]) if count else 1.0
    unit = np.arange(count)
    result = effect(
        [(Sample(first, unit), Sample(second, unit)) for first, second in good],
        max(count, 1), _MEAN, "difference", block_units=block, resamples=resamples, seed=seed,
    )  # fmt: skip
    name = "Within all limits" if options.slo else "Answered"
    return Compared("attainment", name, "share", "difference", "higher", result, block)


def _sample(column: str, samples: Samples, chosen: "Flags", rank: "NDArray[np.int64]") -> Sample:
    if column == "itl":
        gaps = samples.gaps
        kept = chosen[gaps.request]
        return Sample(gaps.per_token_ms[kept], rank[gaps.request[kept]], gaps.tokens[kept])
    values = getattr(samples, column)
    known = chosen & ~np.isnan(values)
    return Sample(values[known], rank[known])


def _series(first: "Floats", second: "Floats") -> "list[Floats]":
    """Returns the series that a queue may correlate: each side by itself, and the ratio of both."""
    known = (first > 0) & (second > 0)
    logs = np.log(first[known]), np.log(second[known])
    return [*logs, logs[1] - logs[0]]


def _why_not(statistic: Statistic, pairs: Sequence[tuple[Sample, Sample]], count: int, block: float) -> str:
    """Returns why a figure is not judged; "" if it is."""
    if count < MIN_REQUESTS:
        return f"not judged: {count} requests were answered on both sides, {MIN_REQUESTS} are needed"
    if statistic.share is None or statistic.share <= 0.9:
        return ""
    name, beyond = f"p{100 * statistic.share:g}", 1 - statistic.share
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    values = min(sum(len(sample.values) for sample in side) for side in sides)
    episodes = min(sum(_episodes(sample, statistic, block) for sample in side) for side in sides)
    if values * beyond < _BEYOND - 1e-9:
        return f"not judged: a {name} needs {_BEYOND / beyond:.0f} values, these are {values}"
    if episodes < _EPISODES:
        return f"not judged: values beyond the {name} lie in fewer than {_EPISODES} separate stretches; run longer"
    return ""


def _episodes(sample: Sample, statistic: Statistic, block: float) -> int:
    """Stretches of requests at a figure or beyond, a third of a block apart (a block is three times the memory)."""
    beyond = np.unique(sample.unit[sample.values >= statistic.of(sample)])
    return int((np.diff(beyond) > block / 3).sum()) + 1 if len(beyond) else 0


def _token_rates(one: MeasuredRun, moments: int) -> "Floats":
    span = one.span
    inside = span.holds(one.samples.arrivals.at_s)
    counted = np.histogram(
        one.samples.arrivals.at_s[inside],
        moments,
        range=(span.start_s, max(span.end_s, span.start_s + 1e-9)),
        weights=one.samples.arrivals.tokens[inside],
    )[0]
    return np.asarray(counted * moments / max(span.duration_s, 1e-9), dtype=np.float64)


def _good(samples: Samples, options: MeasureOptions) -> "Floats":
    flags = [keeps(samples, metric, limit_ms) for metric, limit_ms in options.slo.items()]
    return np.asarray(np.logical_and.reduce([samples.completed, *flags]), dtype=np.float64)
