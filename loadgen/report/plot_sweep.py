"""Pictures of a sweep: latency, normalized latency and goodput against load, and throughput against interactivity."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.report.figures import duration, number, share
from loadgen.report.palette import BLUE, GREY, INK, MUTED, ORANGE, RED, SURFACE, TEAL
from loadgen.report.plot_style import Picture, headline, limit_line, log_ticks, new_figure, percent_axis, styled
from loadgen.report.rows import limits_text
from loadgen.report.sweep_text import AXIS_NAMES
from loadgen.sweep.load_level import UNITS, LoadLevel
from loadgen.sweep.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOG_FROM = 4.0  # loads of which the highest is this many times the lowest
_MAX_TICKS = 9
_ROOM_FOR_A_LABEL_PX = (44.0, 14.0)


class _Line(NamedTuple):
    name: str
    value: Callable[[LoadLevel], float]
    colour: str


def sweep_pictures(sweep: Sweep, slo: Mapping[str, float]) -> tuple[Picture, ...]:
    """All of them; the one of goodput only where there are limits."""
    pictures = [latency_by_load(sweep, slo), normalized_by_load(sweep)]
    if slo:
        pictures.append(goodput_by_load(sweep, slo))
    return (*pictures, throughput_by_interactivity(sweep))


def latency_by_load(sweep: Sweep, slo: Mapping[str, float]) -> Picture:
    """TTFT and TPOT, p50 and p99, with the line of the limit."""
    panels = (
        ("TTFT", lambda load_level: load_level.ttft.p50, lambda load_level: load_level.ttft.p99, slo.get("ttft")),
        ("TPOT", lambda load_level: load_level.tpot.p50, lambda load_level: load_level.tpot.p99, slo.get("tpot")),
    )
    with styled():
        figure = new_figure(3.7)
        for axes, (title, half, tail, limit_ms) in zip(figure.subplots(1, 2), panels, strict=True):
            names = [(title, INK), ("p50", BLUE), ("p99", ORANGE)]
            _draw(axes, sweep, [_Line("p50", half, BLUE), _Line("p99", tail, ORANGE)])
            if limit_ms is not None:
                names.append(limit_line(axes.axhline, limit_ms))
            _log_time(axes, [limit_ms] if limit_ms else [])
            _load_axis(axes, sweep)
            headline(axes, *names)
    return Picture(
        name="sweep-latency",
        title="Latency against load",
        caption=f"Every dot is a run.{_void_note(sweep)}",
        alt=_spoken(
            sweep, lambda load_level: f"TTFT p50 {duration(load_level.ttft.p50)}, p99 {duration(load_level.ttft.p99)}"
        ),
        figure=figure,
    )


def normalized_by_load(sweep: Sweep) -> Picture:
    """The mean of end-to-end latency over tokens, as papers on serving draw it."""
    with styled():
        figure = new_figure(3.4)
        axes = figure.subplots()
        _draw(axes, sweep, [_Line("mean", lambda load_level: load_level.normalized.mean, BLUE)])
        _log_time(axes, [])
        _load_axis(axes, sweep)
        headline(axes, ("Normalized latency per token, mean", INK))
    return Picture(
        name="sweep-normalized",
        title="Normalized latency against load",
        caption=f"Mean over requests of end-to-end latency divided by tokens of the answer.{_void_note(sweep)}",
        alt=_spoken(sweep, lambda load_level: f"{duration(load_level.normalized.mean)} per token"),
        figure=figure,
    )


def goodput_by_load(sweep: Sweep, slo: Mapping[str, float]) -> Picture:
    """Good requests per second beside those that were answered, and the share of good ones with the targets."""
    with styled():
        figure = new_figure(3.7)
        left, right = figure.subplots(1, 2)
        names = [("Requests per second", INK), ("within all limits", TEAL), ("answered", BLUE)]
        _draw(
            left,
            sweep,
            [
                _Line("answered", lambda load_level: load_level.requests_per_s, BLUE),
                _Line("good", lambda load_level: load_level.goodput_per_s, TEAL),
            ],
        )
        if sweep.axis == "rate":
            offered = np.linspace(
                0 if not _is_log(sweep) else sweep.load_levels[0].load, sweep.load_levels[-1].load, 200
            )
            left.plot(offered, offered, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            names.append(("offered", MUTED))
        left.set_ylim(0, 1.2 * (max(load_level.requests_per_s for load_level in sweep.load_levels) or 1.0))
        _load_axis(left, sweep)
        headline(left, *names)
        _draw(right, sweep, [_Line("share", lambda load_level: 100 * load_level.attainment, TEAL)])
        percent_axis(right)
        right.set_ylim(0, 104)
        for one in sweep.answers:
            right.axhline(100 * one.target, color=RED, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
            if one.load is not None:
                right.plot([one.load, one.load], [0, 100 * one.target], color=RED, linewidth=1, zorder=1)
        _load_axis(right, sweep)
        answers = [(f"{share(one.target)} up to {one.load:g}", RED) for one in sweep.answers if one.load is not None]
        headline(right, ("Within all limits", INK), *answers)
    return Picture(
        name="sweep-goodput",
        title="Goodput against load",
        caption=f"Limits: {limits_text(slo)}. Failures, timeouts and drops count as bad.{_void_note(sweep)}",
        alt=_spoken(sweep, lambda load_level: f"{share(load_level.attainment)} within all limits"),
        figure=figure,
    )


def throughput_by_interactivity(sweep: Sweep) -> Picture:
    """What the server delivers to all, against what one user sees; every dot is a load."""
    with styled():
        figure = new_figure(4.0)
        axes = figure.subplots()
        shown = [load_level for load_level in sweep.load_levels if np.isfinite(load_level.interactivity)]
        valid = [load_level for load_level in shown if load_level.counts]
        axes.plot(
            [load_level.interactivity for load_level in valid],
            [load_level.output_tokens_per_s for load_level in valid],
            color=BLUE,
            marker="o",
            markersize=5,
            markeredgecolor=SURFACE,
        )
        for load_level in shown:
            if not load_level.counts:
                _void_dot(axes, load_level.interactivity, load_level.output_tokens_per_s)
        axes.margins(x=0.08, y=0.12)
        axes.set_ylim(bottom=0)
        if shown and min(load_level.interactivity for load_level in shown) < 0.4 * max(
            load_level.interactivity for load_level in shown
        ):
            axes.set_xlim(left=0)
        _label_loads(axes, shown)
        axes.grid(visible=True, axis="both")
        axes.set_xlabel("tokens per second and user (1 / TPOT p50)")
        headline(axes, ("Output tokens per second, all readers", INK), (f"numbers: {UNITS[sweep.axis]}", MUTED))
    return Picture(
        name="sweep-pareto",
        title="Throughput against interactivity",
        caption=f"Up is more for the machine, right is more for each reader.{_void_note(sweep)}",
        alt=_spoken(
            sweep,
            lambda load_level: (
                f"{number(load_level.output_tokens_per_s)} tokens/s, {number(load_level.interactivity)} for each reader"
            ),
        ),
        figure=figure,
    )


def _draw(axes: "Axes", sweep: Sweep, lines: Sequence[_Line]) -> None:
    for line in lines:
        values = [(load_level, line.value(load_level)) for load_level in sweep.load_levels]
        known = [(load_level.load, value) for load_level, value in values if load_level.counts and np.isfinite(value)]
        if known:
            axes.plot(
                *zip(*known, strict=True),
                color=line.colour,
                marker="o",
                markersize=5,
                markeredgecolor=SURFACE,
                zorder=3,
            )
        for load_level, value in values:
            if not load_level.counts and np.isfinite(value):
                _void_dot(axes, load_level.load, value)


def _void_dot(axes: "Axes", x: float, y: float) -> None:
    axes.plot([x], [y], "x", color=GREY, markersize=6, markeredgewidth=1.6, zorder=2)


def _void_note(sweep: Sweep) -> str:
    void = [f"{load_level.load:g}" for load_level in sweep.load_levels if not load_level.counts]
    return f" Grey crosses prove nothing: {', '.join(void)} {UNITS[sweep.axis]} invalid or broken off." if void else ""


def _spoken(sweep: Sweep, what: Callable[[LoadLevel], str]) -> str:
    return (
        ". ".join(f"At {load_level.load:g} {UNITS[sweep.axis]}: {what(load_level)}" for load_level in sweep.load_levels)
        + "."
    )


def _is_log(sweep: Sweep) -> bool:
    return sweep.load_levels[-1].load >= _LOG_FROM * sweep.load_levels[0].load


def _label_loads(axes: "Axes", load_levels: Sequence[LoadLevel]) -> None:
    """The load beside its dot, where there is room for it."""
    labelled: list[tuple[float, float]] = []
    for load_level in load_levels:
        at = (load_level.interactivity, load_level.output_tokens_per_s)
        x, y = axes.transData.transform(at)
        wide, high = _ROOM_FOR_A_LABEL_PX
        if all(abs(x - other_x) > wide or abs(y - other_y) > high for other_x, other_y in labelled):
            labelled.append((x, y))
            axes.annotate(
                f"{load_level.load:.3g}", at, xytext=(6, 4), textcoords="offset points", fontsize=8, color=MUTED
            )


def _load_axis(axes: "Axes", sweep: Sweep) -> None:
    low, high = sweep.load_levels[0].load / 1.1, sweep.load_levels[-1].load * 1.1
    if _is_log(sweep):
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        log_ticks(axes.xaxis, low, high, "{:g}".format, max_ticks=_MAX_TICKS)
    else:
        axes.set_xlim(0, high)
    axes.set_xlabel(AXIS_NAMES[sweep.axis])


def _log_time(axes: "Axes", also_ms: Sequence[float]) -> None:
    """A logarithmic axis around all that is drawn and what else shall be seen."""
    drawn = [float(y) for line in axes.lines for y in np.asarray(line.get_ydata(), dtype=float) if y > 0]
    ends = [*drawn, *also_ms]
    if ends:
        low, high = min(ends) / 1.25, max(ends) * 1.25
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        log_ticks(axes.yaxis, low, high, max_ticks=7)
