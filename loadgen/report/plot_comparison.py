"""Pictures of a comparison: ratios with their intervals, latencies laid over each other, and the runs over time."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from loadgen.comparison.comparable import Side
from loadgen.comparison.compare import Comparison
from loadgen.comparison.contrasts import Compared, MeasuredRun, due, measured
from loadgen.measure.metrics import MeasureOptions
from loadgen.measure.timeseries import Timeseries, timeseries
from loadgen.report.comparison_text import conclusion, effect_text, interval_text
from loadgen.report.palette import BLUE, GREY, INK, MUTED, ORANGE, RED, SURFACE, TEAL
from loadgen.report.plot_latency import Curve, draw_curves, finish_panel
from loadgen.report.plot_style import Picture, headline, log_ticks, named_ticks, new_figure, percent_axis, styled
from loadgen.report.plot_timeline import bin_width_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

SIDE_COLOURS = (BLUE, ORANGE, TEAL, RED, INK)
_MAX_BINS = 120
_LONGEST_LABEL = 30
_RATIO_TICKS = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100,
)  # fmt: skip
_FEW_RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def comparison_pictures(comparison: Comparison, sides: Sequence[Side]) -> tuple[Picture, ...]:
    """All of them; sides in the order of the comparison."""
    runs = [measured(side.runs, comparison.options) for side in sides]
    labels = [side.label for side in sides]
    return (
        ratios(comparison),
        cumulative(labels, runs, comparison.options),
        timelines(labels, runs),
    )


def ratios(comparison: Comparison) -> Picture:
    """A dot and an interval for every ratio, over a line where both are the same."""
    figures = [[one for one in versus.figures if one.contrast == "ratio"] for versus in comparison.versus]
    names = [one.name for one in figures[0]]
    with styled():
        figure = new_figure(1.2 + 0.3 * len(names) * max(1.0, 0.6 * len(figures)))
        axes = figure.subplots()
        ends = [1 / 1.02, 1.02]
        for number, row in enumerate(figures):
            colour = SIDE_COLOURS[(number + 1) % len(SIDE_COLOURS)]
            offset = (number - (len(figures) - 1) / 2) * 0.6 / len(figures)
            for place, one in enumerate(row):
                ends += _draw_ratio(axes, one, place + offset, colour)
        low, high = min(ends) / 1.03, max(ends) * 1.03
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        shown = [tick for tick in _RATIO_TICKS if low <= tick <= high]
        few = [tick for tick in shown if tick in _FEW_RATIO_TICKS]
        named_ticks(axes.xaxis, shown if len(shown) <= 10 else few, "{:g}".format)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.tick_params(axis="y", labelcolor=INK)
        if len(figures) == 1:
            _write_conclusions(axes, figures[0])
        headline(
            axes,
            (f"Ratio to {_short(comparison.baseline)}", INK),
            *(
                (_short(versus.label), SIDE_COLOURS[(number + 1) % len(SIDE_COLOURS)])
                for number, versus in enumerate(comparison.versus)
            ),
            ("hollow: could be chance", MUTED),
            ("grey: not judged", MUTED),
        )
    spoken = "; ".join(
        f"{versus.label}, {one.name}: {effect_text(one, one.effect.value)}, {conclusion(one)}"
        for versus in comparison.versus
        for one in versus.figures
    )
    return Picture(
        name="comparison-ratios",
        title="Ratios",
        caption="Ratio to the first side with its 95 % interval; below 1 is faster, but for tokens per second.",
        alt=f"Ratios to {comparison.baseline}. {spoken}.",
        figure=figure,
    )


def cumulative(labels: Sequence[str], runs: Sequence[Sequence[MeasuredRun]], options: MeasureOptions) -> Picture:
    """Share of requests at or below each latency, a curve per side, a thin one per repeat."""
    panels = (("TTFT", "ttft", "ttft"), ("TPOT", "tpot", "tpot"), ("E2E", "e2e", "e2el"))
    with styled():
        figure = new_figure(3.5)
        columns = figure.subplots(1, 3, sharey=True)
        percent_axis(columns[0])
        for axes, (title, column, limit) in zip(columns, panels, strict=True):
            _draw_cumulative(axes, title, runs, column, options.slo.get(limit))
        _name_sides(figure, labels)
    repeats = " Thin: each run by itself." if len(runs[0]) > 1 else ""
    return Picture(
        name="comparison-cdf",
        title="Latencies laid over each other",
        caption=f"Share of requests at or below a latency, from when they were due. Logarithmic axis.{repeats}",
        alt=f"Cumulative curves of TTFT, TPOT and end-to-end latency of {', '.join(labels)}.",
        figure=figure,
    )


def timelines(labels: Sequence[str], runs: Sequence[Sequence[MeasuredRun]]) -> Picture:
    """What was in flight, what came out and how long first tokens took, over the time of the runs."""
    longest_s = max(one.run.ended_s for side in runs for one in side) or 1.0
    bin_s = bin_width_s(longest_s, _MAX_BINS)
    with styled():
        figure = new_figure(6.0)
        rows = figure.subplots(3, 1, sharex=True)
        for number, side in enumerate(runs):
            colour = SIDE_COLOURS[number % len(SIDE_COLOURS)]
            for one in side:
                _draw_run(
                    rows, timeseries(one.run, one.samples, bin_s=bin_s), colour, alpha=0.9 if len(side) == 1 else 0.45
                )
        _name_sides(figure, labels)
        headline(rows[0], ("Requests in flight", INK))
        headline(rows[1], ("Output tokens per second", INK))
        headline(rows[2], ("TTFT p50 of requests due then", INK))
        rows[0].set_ylim(bottom=0)
        rows[1].set_ylim(bottom=0)
        if rows[2].lines:
            rows[2].set_yscale("log")
            log_ticks(rows[2].yaxis, *rows[2].get_ylim(), max_ticks=5)
        rows[2].set_xlim(0, longest_s)
        rows[2].set_xlabel("seconds from the start of each run")
    return Picture(
        name="comparison-timeline",
        title="The runs over time",
        caption=f"Means per {bin_s:g} s; every run is a line.",
        alt=f"Requests in flight, output tokens per second and median TTFT over time, for {', '.join(labels)}.",
        figure=figure,
    )


def _draw_ratio(axes: "Axes", one: Compared, place: float, colour: str) -> list[float]:
    """Draws it; returns how far it reaches."""
    value, low, high = one.effect.value, one.effect.low, one.effect.high
    if math.isnan(value):
        return []
    colour = colour if one.judged else GREY
    if one.judged:
        axes.plot([low, high], [place, place], color=colour, linewidth=2.4, alpha=1.0 if one.significant else 0.45)
    axes.plot(
        [value], [place], "o", color=colour, markersize=6, markeredgewidth=1.4, markeredgecolor=colour,
        markerfacecolor=colour if one.significant else SURFACE, zorder=3,
    )  # fmt: skip
    return [end for end in (value, low, high) if not math.isnan(end)]


def _write_conclusions(axes: "Axes", row: Sequence[Compared]) -> None:
    """At the right of every line, in place of a second axis."""
    twin = axes.twinx()
    twin.set_ylim(axes.get_ylim())
    twin.set_yticks(
        range(len(row)),
        [
            f"{effect_text(one, one.effect.value)} ({interval_text(one)})"
            if one.judged
            else effect_text(one, one.effect.value)
            for one in row
        ],
    )
    twin.grid(visible=False)
    twin.tick_params(axis="y", labelcolor=MUTED)


def _draw_cumulative(
    axes: "Axes", title: str, runs: Sequence[Sequence[MeasuredRun]], column: str, limit_ms: float | None
) -> None:
    ends: list[float] = []
    for number, side in enumerate(runs):
        colour = SIDE_COLOURS[number % len(SIDE_COLOURS)]
        several = [values for one in side if len(values := _values(one, column))]
        if not several:
            continue
        together = np.concatenate(several)
        ends += draw_curves(axes, [Curve("", together, colour)])
        if len(several) > 1:
            draw_curves(axes, [Curve("", values, colour, faint=True) for values in several])
        axes.plot([np.median(together)], [50], "o", color=colour, markersize=4.5, markeredgecolor=SURFACE, zorder=5)
    finish_panel(axes, ends, [(title, INK)], limit_ms)


def _name_sides(figure: "Figure", labels: Sequence[str]) -> None:
    """One line above all panels, each name in its colour."""
    colours = [SIDE_COLOURS[number % len(SIDE_COLOURS)] for number in range(len(labels))]
    figure.legend(
        [Line2D([], [], color=colour, linewidth=3) for colour in colours],
        [_short(label) for label in labels],
        loc="outside upper left", ncols=4, frameon=False, labelcolor=colours, handlelength=1.2, borderpad=0,
    )  # fmt: skip


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"


def _draw_run(rows: Sequence["Axes"], series: Timeseries, colour: str, *, alpha: float) -> None:
    middle = series.start_s + series.bin_s / 2
    known = ~np.isnan(series.ttft_p50_ms)
    for axes, values in zip(rows[:2], (series.in_flight, series.output_tokens), strict=True):
        axes.plot(middle, values, color=colour, alpha=alpha)
    if known.any():
        rows[2].plot(middle[known], series.ttft_p50_ms[known], color=colour, alpha=alpha)


def _values(one: MeasuredRun, column: str) -> "Floats":
    values: Floats = getattr(one.samples, column)[due(one) & one.samples.completed]
    return values[values > 0]
