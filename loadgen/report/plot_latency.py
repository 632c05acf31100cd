"""How latencies are spread: cumulative curves, percentiles far into the tail, and TTFT against prompt length."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.patheffects import withStroke

from loadgen.measure.metrics import Metrics
from loadgen.measure.quantiles import quantiles
from loadgen.measure.samples import Samples
from loadgen.report.figures import duration
from loadgen.report.palette import BLUE, INK, ORANGE, RED, SURFACE, TEAL
from loadgen.report.plot_style import Picture, headline, limit_line, log_ticks, new_figure, percent_axis, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from loadgen.record import RunData

    Floats = NDArray[np.float64]

_CURVE_POINTS = 300
_MAX_DOTS = 1000
# What is faster than all but this share is off the axis: messages that came together are microseconds apart.
_MIN_SHARE = 0.01
_LENGTH_BINS = 16
# Requests a range of prompt lengths needs before its median is drawn.
_MIN_FOR_MEDIAN = 10
_PERCENT_TICKS = (0.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99, 99.999, 99.9999)


class Curve(NamedTuple):
    """Samples with a name and a look; `weights` as in `quantiles`, a faint curve is thin and pale."""

    name: str
    values: "Floats"
    colour: str
    dashed: bool = False
    weights: "Floats | None" = None
    faint: bool = False


class Median(NamedTuple):
    """Of the TTFT of prompts of `low` to `high` tokens, half of them of at most `middle`."""

    low: float
    middle: float
    high: float
    ttft_ms: float


def cumulative(metrics: Metrics, samples: Samples) -> Picture:
    """Share of requests at or below each latency: TTFT, TPOT with ITL, and E2E."""
    chosen = _window(metrics, samples)
    pooled = chosen[samples.gaps.request]
    gaps = samples.gaps
    tpot = [
        Curve("per request", samples.tpot[chosen], BLUE),
        Curve("ITL, per token", gaps.per_token_ms[pooled], TEAL, weights=gaps.tokens[pooled]),
    ]
    panels = (
        ("TTFT", _since_due_and_sent(samples.ttft[chosen], samples.service_ttft[chosen]), "ttft"),
        ("TPOT", tpot, "tpot"),
        ("E2E", _since_due_and_sent(samples.e2e[chosen], samples.service_e2e[chosen]), "e2el"),
    )
    with styled():
        figure = new_figure(3.1)
        columns = figure.subplots(1, 3, sharey=True)
        percent_axis(columns[0])
        for axes, (title, curves, limit) in zip(columns, panels, strict=True):
            ends = draw_curves(axes, curves)
            drawn = [curve for curve in curves if _has_place(curve)]
            names = [(title, INK), *((curve.name, curve.colour) for curve in drawn)]
            finish_panel(axes, ends, names, metrics.options.slo.get(limit))
            if drawn:
                _mark(axes, _known(drawn[0]))
    ttft, e2e = metrics.steady.latencies.ttft, metrics.steady.latencies.e2e
    return Picture(
        name="latency-cdf",
        title="How latencies are spread",
        caption="Share of requests (of tokens for ITL) at or below a latency. Dots: p50 and p99. Logarithmic axis.",
        alt=(
            f"Cumulative curves. TTFT: half within {duration(ttft.p50)}, 99 % within {duration(ttft.p99)}. "
            f"E2E: half within {duration(e2e.p50)}, 99 % within {duration(e2e.p99)}."
        ),
        figure=figure,
    )


def percentile_curves(metrics: Metrics, samples: Samples) -> Picture:
    """Latency against percentile, every nine of the tail as wide as the one before."""
    chosen = _window(metrics, samples)
    pooled = chosen[samples.gaps.request]
    curves = [
        Curve("E2E", samples.e2e[chosen], INK),
        Curve("TTFT", samples.ttft[chosen], BLUE),
        Curve("TTFT since sent", samples.service_ttft[chosen], ORANGE, dashed=True),
        Curve("longest stall", samples.max_stall[chosen], RED),
        Curve("ITL", samples.gaps.per_token_ms[pooled], TEAL, weights=samples.gaps.tokens[pooled]),
    ]
    with styled():
        figure = new_figure(3.6)
        axes = figure.subplots()
        furthest, ends, lowest = 1.0, [], np.inf
        for curve in map(_known, curves):
            if len(curve.values) < 2 or not (curve.values > 0).any():
                continue
            nines = min(6.0, np.log10(len(curve.values)))
            places = np.linspace(0.0, nines, _CURVE_POINTS)
            values = _above_zero(quantiles(curve.values, (1 - 10.0**-places).tolist(), curve.weights))
            axes.plot(places, values, color=curve.colour, linestyle="--" if curve.dashed else "-")
            ends.append((float(values[-1]), float(places[-1]), curve))
            furthest = max(furthest, nines)
            lowest = min(lowest, float(np.nanmin(values[1 - 10.0**-places >= _MIN_SHARE])))
        if ends:
            axes.set_yscale("log")
            axes.set_ylim(bottom=lowest * 0.8)
            log_ticks(axes.yaxis, *axes.get_ylim())
        axes.set_xlim(0, furthest)
        ticks = {2.0 - np.log10(100.0 - percent): f"{percent:.7g} %" for percent in _PERCENT_TICKS}
        ticks = {place: text for place, text in ticks.items() if place <= furthest + 1e-6}
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.grid(visible=True, axis="both")
        headline(
            axes,
            ("Latency by percentile", INK),
            *((curve.name, curve.colour) for _, _, curve in sorted(ends, key=lambda end: -end[0])),
        )
    ttft = metrics.steady.latencies.ttft
    return Picture(
        name="percentiles",
        title="The tail",
        caption="Latency at each percentile; a curve ends where one sample is left. Both axes logarithmic.",
        alt=f"Latency against percentile. TTFT: 99 % within {duration(ttft.p99)}, all within {duration(ttft.max)}.",
        figure=figure,
    )


def ttft_by_prompt(run: "RunData", metrics: Metrics, samples: Samples) -> Picture:
    """A dot per request, and the median of each range of lengths with enough of them."""
    chosen = np.flatnonzero(_window(metrics, samples) & (samples.ttft > 0))
    lengths, ttft = run.workload.input_tokens[chosen], samples.ttft[chosen]
    cached = run.requests["server_cached_tokens"][chosen] > 0
    shown = np.arange(len(chosen))
    if len(chosen) > _MAX_DOTS:
        shown = np.linspace(0, len(chosen) - 1, _MAX_DOTS).astype(np.int64)
    medians = _medians(lengths, ttft)
    with styled():
        figure = new_figure(3.4)
        axes = figure.subplots()
        names = [("TTFT", INK)]
        for flags, colour, name in ((~cached, BLUE, "requests"), (cached, TEAL, "part of the prompt cached")):
            dots = shown[flags[shown]]
            if len(dots):
                axes.scatter(
                    lengths[dots], ttft[dots], s=8 if len(chosen) > 200 else 20, color=colour, alpha=0.45, linewidths=0
                )
                names.append((name, colour))
        for median in medians:
            axes.plot([median.low, median.high], [median.ttft_ms] * 2, color=INK)
            axes.plot(
                median.middle, median.ttft_ms, "o", color=INK, markersize=4.5, markeredgecolor=SURFACE,
                markeredgewidth=0.6,
            )  # fmt: skip
        if medians:
            names.append((f"median of {_MIN_FOR_MEDIAN} or more of about one length", INK))
        if len(chosen):
            axes.set_yscale("log")
            log_ticks(axes.yaxis, *axes.get_ylim(), max_ticks=6)
        axes.set_xlim(left=0)
        axes.set_xlabel("prompt tokens")
        headline(axes, *names)
    left_out = (
        f" {len(shown):,} of {len(chosen):,} requests are drawn, evenly chosen." if len(shown) < len(chosen) else ""
    )
    return Picture(
        name="ttft-by-prompt",
        title="TTFT against prompt length",
        caption=f"From when each request was due, so that queueing is in it.{left_out}",
        alt=(
            "Time to first token against prompt tokens, a dot per request"
            + "".join(
                f"; median of {median.low:,.0f} to {median.high:,.0f} tokens {duration(median.ttft_ms)}"
                for median in medians
            )
            + "."
        ),
        figure=figure,
    )


def _medians(lengths: "NDArray[np.int64]", ttft: "Floats") -> list[Median]:
    """Of ranges of lengths, all of the same width; none where requests are few."""
    if not len(lengths):
        return []
    edges = np.linspace(lengths.min(), lengths.max() + 1, _LENGTH_BINS + 1)
    own = np.digitize(lengths, edges)
    return [
        Median(
            low=float(lengths[own == number].min()),
            middle=float(np.median(lengths[own == number])),
            high=float(lengths[own == number].max()),
            ttft_ms=float(np.median(ttft[own == number])),
        )
        for number in np.flatnonzero(np.bincount(own) >= _MIN_FOR_MEDIAN).tolist()
    ]


def _window(metrics: Metrics, samples: Samples) -> "NDArray[np.bool_]":
    span = metrics.steady.span
    return samples.completed & (
        span.holds(samples.scheduled_s) if span.steady else np.ones(len(samples.completed), bool)
    )


def _known(curve: Curve) -> Curve:
    """Without NaN."""
    keep = ~np.isnan(curve.values)
    return curve._replace(values=curve.values[keep], weights=None if curve.weights is None else curve.weights[keep])


def _above_zero(values: Sequence[float]) -> "Floats":
    """Zeros become gaps: a logarithmic axis has no place for them, but they count among the samples."""
    return np.where(np.asarray(values) > 0, values, np.nan)


def _since_due_and_sent(due: "Floats", sent: "Floats") -> list[Curve]:
    return [Curve("since due", due, BLUE), Curve("since sent", sent, ORANGE, dashed=True)]


def draw_curves(axes: "Axes", curves: Iterable[Curve]) -> list[float]:
    """Draws the share of samples at or below each latency; returns latencies that the axis has to include."""
    ends: list[float] = []
    shares = np.linspace(0.0, 1.0, _CURVE_POINTS)
    for curve in filter(_has_place, map(_known, curves)):
        values = _above_zero(quantiles(curve.values, shares.tolist(), curve.weights))
        look: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.4} if curve.faint else {}
        axes.plot(values, 100 * shares, color=curve.colour, linestyle="--" if curve.dashed else "-", **look)
        ends += [float(np.nanmin(values[shares >= _MIN_SHARE])), float(values[-1])]
    return ends


def finish_panel(axes: "Axes", ends: list[float], names: list[tuple[str, str]], limit_ms: float | None) -> None:
    """Adds the limit, a logarithmic axis that includes `ends`, and the headline of `names`."""
    if limit_ms is not None:
        names = [*names, limit_line(axes.axvline, limit_ms)]
        ends = [*ends, limit_ms]
    if ends:
        axes.set_xscale("log")
        axes.set_xlim(min(ends) * 0.9, max(ends) * 1.1)
        log_ticks(axes.xaxis, *axes.get_xlim(), max_ticks=4)
    headline(axes, *names)


def _has_place(curve: Curve) -> bool:
    """Returns whether a curve has a value that a logarithmic axis can show."""
    return bool((curve.values > 0).any())


def _mark(axes: "Axes", curve: Curve) -> None:
    """Dots at p50 and p99, their figures on the side where there is room."""
    low, high = np.log(axes.get_xlim())
    for value, percent, rise in zip(
        quantiles(curve.values, [0.5, 0.99], curve.weights), (50, 99), (2, -12), strict=True
    ):
        if value <= 0:
            continue
        axes.plot(
            value, percent, "o", color=curve.colour, markersize=4.5, markeredgecolor=SURFACE, clip_on=False, zorder=5
        )
        is_far_left = np.log(value) < low + 0.45 * (high - low)
        axes.annotate(
            f"p{percent} {duration(value)}",
            (value, percent),
            xytext=(7, min(rise, -4)) if is_far_left else (-7, rise),
            textcoords="offset points",
            ha="left" if is_far_left else "right",
            fontsize=8,
            color=INK,
            path_effects=[withStroke(linewidth=2.5, foreground=SURFACE)],  # a box would hide the curve's end
        )
