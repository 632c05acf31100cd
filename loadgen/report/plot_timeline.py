"""The run over time: what was asked, what was under way, what came out, how long first tokens took."""

from typing import TYPE_CHECKING

import numpy as np

from loadgen.measure.metrics import Metrics
from loadgen.measure.samples import Samples
from loadgen.measure.timeseries import Timeseries, timeseries
from loadgen.record import RunData
from loadgen.report.figures import number
from loadgen.report.plot_style import (
    BLUE,
    GREY,
    INK,
    MUTED,
    ORANGE,
    RED,
    SHADE,
    Picture,
    headline,
    log_time,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0)
_LEAST_BINS, _MOST_BINS = 20, 150


def timeline(run: RunData, metrics: Metrics, samples: Samples) -> Picture:
    """Four rows over one axis of time."""
    most_bins = min(_MOST_BINS, max(_LEAST_BINS, 2 * len(run.requests)))
    fitting = [width_s for width_s in _BINS_S if run.ended_s / width_s <= most_bins]
    series = timeseries(run, samples, bin_s=fitting[0] if fitting else run.ended_s / most_bins)
    mean = metrics.steady.throughput.output_tokens_per_s
    with styled():
        figure = new_figure(6.8)
        rows = figure.subplots(4, 1, sharex=True)
        _draw_requests(rows[0], series)
        _draw_load(rows[1], series)
        _draw_tokens(rows[2], series, metrics)
        _draw_ttft(rows[3], series)
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
        caption=f"Means per {series.bin_s:g} s.{outside}",
        alt=(
            f"Curves over {number(run.ended_s)} seconds: requests due and answered per second, requests under way "
            f"(at most {metrics.whole.throughput.peak_in_flight}), output tokens per second (mean {number(mean)}), "
            "and time to first token."
        ),
        figure=figure,
    )


def _middle(series: Timeseries) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
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
    names = [("Requests", INK), ("under way", BLUE)]
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


def _draw_ttft(axes: "Axes", series: Timeseries) -> None:
    headline(axes, ("TTFT of requests due then", INK), ("p50", BLUE), ("p99", ORANGE))
    if np.nanmax(series.ttft_p50_ms, initial=0.0) > 0:
        for values, colour in ((series.ttft_p50_ms, BLUE), (series.ttft_p99_ms, ORANGE)):
            shown = np.where(values > 0, values, np.nan)  # broken where nothing was due
            axes.plot(_middle(series), shown, color=colour, marker=".", markersize=3.5)
        axes.set_yscale("log")
        log_time(axes.yaxis, *axes.get_ylim(), most_ticks=4)
