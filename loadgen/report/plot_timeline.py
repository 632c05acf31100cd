"""The run over time: what was asked, what was in flight, what came out, how long first tokens took."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.measure.metrics import Metrics
from loadgen.measure.samples import Samples
from loadgen.measure.timeseries import Timeseries, timeseries
from loadgen.record import RunData
from loadgen.report.figures import number
from loadgen.report.palette import BLUE, GREY, INK, MUTED, ORANGE, RED, SHADE
from loadgen.report.plot_style import Picture, headline, log_ticks, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_BINS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0)
_MIN_BINS, _MAX_BINS, _REQUESTS_PER_BIN = 20, 150, 4
_MAX_DOTS = 800
# Requests a bin needs before its median is drawn.
_MIN_FOR_MEDIAN = 20
# Percentile of the tail, and the requests a bin needs for it (two lie above); the first with enough bins is drawn.
_TAILS = ((99, 200), (95, 40), (90, 20))
_MIN_BINS_OF_TAIL = 5


class Bin(NamedTuple):
    """Samples from `low` up to `high`; the last bin holds its upper edge too.

    Attributes:
        low, high: its edges.
        members: [samples] int64, indexes of what lies in it.
    """

    low: float
    high: float
    members: "NDArray[np.int64]"


def full_bins(places: "NDArray[np.float64]", edges: "Sequence[float] | NDArray[np.float64]", least: int) -> list[Bin]:
    """Merges consecutive bins until each holds at least `least` samples; the rest joins the last one.

    Args:
        places: [samples] float64; those outside the edges are in no bin.
        edges: ascending, of the narrowest bins there can be.
        least: samples of a bin, at least 1.
    Returns: bins side by side over all edges, in order; none where there are fewer than `least` samples in all.
    """
    edges = np.asarray(edges, dtype=np.float64)
    inside = np.flatnonzero((places >= edges[0]) & (places <= edges[-1]))
    own = np.minimum(np.searchsorted(edges, places[inside], side="right") - 1, len(edges) - 2)
    found: list[Bin] = []
    first, held = 0, 0
    for index, count in enumerate(np.bincount(own, minlength=len(edges) - 1).tolist()):
        held += count
        if held >= least:
            found.append(Bin(float(edges[first]), float(edges[index + 1]), inside[(own >= first) & (own <= index)]))
            first, held = index + 1, 0
    if found and first < len(edges) - 1:
        low, _, members = found.pop()
        found.append(Bin(low, float(edges[-1]), np.sort(np.concatenate((members, inside[own >= first])))))
    return found


class Tail(NamedTuple):
    """The percentile that a run has enough requests for, and the bins to draw it in."""

    percentile: int
    bins: list[Bin]


def timeline(run: RunData, metrics: Metrics, samples: Samples) -> Picture:
    """Four rows over one axis of time."""
    max_bins = min(_MAX_BINS, max(_MIN_BINS, len(run.requests) // _REQUESTS_PER_BIN))
    series = timeseries(run, samples, bin_s=bin_width_s(run.ended_s, max_bins))
    mean = metrics.steady.throughput.output_tokens_per_s
    with styled():
        figure = new_figure(6.8)
        rows = figure.subplots(4, 1, sharex=True)
        _draw_requests(rows[0], series)
        _draw_load(rows[1], series)
        _draw_tokens(rows[2], series, metrics)
        left_out = _draw_ttft(rows[3], series, samples)
        end_s = float(series.start_s[-1] + series.bin_s)
        for axes in rows:
            span = metrics.steady.span
            axes.axvspan(0, span.start_s, color=SHADE, linewidth=0, zorder=0)
            axes.axvspan(min(span.end_s, end_s), end_s, color=SHADE, linewidth=0, zorder=0)
        rows[3].set_xlim(0, end_s)
        rows[3].set_xlabel("seconds from the start")
    outside = " Shaded: outside the measured window." if metrics.steady.span.steady else ""
    return Picture(
        name="timeline",
        title="The run over time",
        caption=f"Means per {series.bin_s:g} s; percentiles of as many requests as they need.{left_out}{outside}",
        alt=(
            f"Curves over {number(run.ended_s)} seconds: requests due and answered per second, requests in flight "
            f"(at most {metrics.whole.throughput.peak_in_flight}), output tokens per second (mean {number(mean)}), "
            "and time to first token."
        ),
        figure=figure,
    )


def bin_width_s(duration_s: float, max_bins: int) -> float:
    """Returns the narrowest round width with which a duration has at most `max_bins` bins."""
    return next((width_s for width_s in _BINS_S if duration_s / width_s <= max_bins), duration_s / max_bins)


def _middle(series: Timeseries) -> "Floats":
    return series.start_s + series.bin_s / 2


def _draw_requests(axes: "Axes", series: Timeseries) -> None:
    edges = np.append(series.start_s, series.start_s[-1] + series.bin_s)
    axes.stairs(series.offered, edges, fill=True, color=GREY, alpha=0.5, linewidth=0)
    axes.plot(_middle(series), series.completed, color=BLUE)
    names = [("Requests per second", INK), ("due", MUTED), ("answered", BLUE)]
    if series.failed.any():
        axes.stairs(series.failed, edges, fill=True, color=RED, linewidth=0)
        names.append(("failed", RED))
    axes.set_ylim(bottom=0)
    headline(axes, *names)


def _draw_load(axes: "Axes", series: Timeseries) -> None:
    axes.fill_between(_middle(series), series.in_flight, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(_middle(series), series.in_flight, color=BLUE)
    names = [("Requests", INK), ("in flight", BLUE)]
    if series.waiting.max(initial=0.0) >= 0.5:
        axes.plot(_middle(series), series.waiting, color=ORANGE)
        names.append(("waiting in the client", ORANGE))
    axes.set_ylim(bottom=0)
    headline(axes, *names)


def _draw_tokens(axes: "Axes", series: Timeseries, metrics: Metrics) -> None:
    axes.fill_between(_middle(series), series.output_tokens, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(_middle(series), series.output_tokens, color=BLUE)
    span, mean = metrics.steady.span, metrics.steady.throughput.output_tokens_per_s
    axes.plot([span.start_s, span.end_s], [mean, mean], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    headline(axes, ("Output tokens per second", INK), (f"mean of the window {number(mean)}", MUTED))


def _draw_ttft(axes: "Axes", series: Timeseries, samples: Samples) -> str:
    """A dot per request, the median and the tail where there are enough of them; returns what was left out."""
    chosen = np.flatnonzero(samples.completed & (samples.ttft > 0))
    due_s, ttft = samples.scheduled_s[chosen], samples.ttft[chosen]
    edges = np.append(series.start_s, series.start_s[-1] + series.bin_s)
    names = [("TTFT of requests due then", INK), ("each", MUTED)]
    shown = np.arange(len(chosen))
    if len(chosen) > _MAX_DOTS:
        shown = np.linspace(0, len(chosen) - 1, _MAX_DOTS).astype(np.int64)
    if len(chosen):
        axes.scatter(due_s[shown], ttft[shown], s=6, color=GREY, alpha=0.7, linewidths=0)
        axes.set_yscale("log")
    medians = full_bins(due_s, edges, _MIN_FOR_MEDIAN)
    tail = _tail(due_s, edges)
    for bins, percentile, colour in ((medians, 50, BLUE), (tail.bins, tail.percentile, ORANGE)):
        if bins:
            values = [float(np.percentile(ttft[one.members], percentile)) for one in bins]
            axes.stairs(values, [bins[0].low, *(one.high for one in bins)], baseline=None, color=colour, linewidth=1.6)
            names.append((f"p{percentile}", colour))
    if len(chosen):
        log_ticks(axes.yaxis, *axes.get_ylim(), max_ticks=4)
    headline(axes, *names)
    if len(shown) < len(chosen):
        return f" Dots: {len(shown):,} of {len(chosen):,} requests, evenly chosen."
    return ""


def _tail(due_s: "Floats", edges: "Floats") -> Tail:
    """The highest percentile with bins enough to see it change."""
    found = [Tail(percentile, full_bins(due_s, edges, least)) for percentile, least in _TAILS]
    return next((tail for tail in found if len(tail.bins) >= _MIN_BINS_OF_TAIL), found[-1])
