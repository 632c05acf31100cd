"""Draws figures against each other: ratios of steps and time, what a step costs, latencies, and the sweep of slots."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from loadgen.experiments.batching.experiment import SweepPoint
from loadgen.experiments.batching.policies import CACHED, CONTINUOUS, STATIC
from loadgen.experiments.batching.results import LATENCIES, CaseResult
from loadgen.report.palette import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Mapping[str, str] = {STATIC: "#c8553d", CONTINUOUS: "#2f6db3", CACHED: "#2f9d8f"}
"""Of the systems, in every chart."""

_TIME, _STEPS, _SIMULATED = "#e0a03c", "#4c4c7f", "#9a9ac8"
_FEWEST, _GROUP = 8, 8  # steps of about a size, below which a median says nothing; rows that count as about a size


def draw_ratios(results: Sequence[CaseResult]) -> Figure:
    """Static over continuous, case by case: steps, those of slots alone, and wall-clock time."""
    figure = Figure(figsize=(9, 1.3 + 0.75 * len(results)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(results))
    times = [result.time_ratio() for result in results]
    columns = {
        "steps of slots alone": (_SIMULATED, [result.simulated_step_ratio for result in results]),
        "steps of the engine": (_STEPS, [result.step_ratio for result in results]),
        "wall-clock time": (_TIME, [time.best for time in times]),
    }
    for number, (label, (colour, values)) in enumerate(columns.items()):
        bars = axes.barh(places + 0.26 * (number - 1), np.array(values) - 1, 0.24, left=1, color=colour, label=label)
        axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4, fontsize=9, color=INK)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(places, [result.case.key for result in results])
    axes.set_xlabel("static over continuous: above 1, static needs more")
    axes.margins(x=0.08)
    axes.invert_yaxis()
    _clean(axes)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=10)
    return figure


def draw_step_cost(results: Sequence[CaseResult]) -> Figure:
    """Milliseconds of a step without prompts by its rows: what an empty slot saves."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    case_runs = [result.best(name) for result in results for name in (STATIC, CONTINUOUS)]
    rows = np.concatenate([case_run.steps.rows for case_run in case_runs])
    ms = np.concatenate([case_run.steps.ms for case_run in case_runs])
    decodes = rows == np.concatenate([case_run.steps.tokens for case_run in case_runs])
    rows, ms = rows[decodes], ms[decodes]
    groups = np.where(
        rows <= _GROUP, rows, -(-rows // _GROUP) * _GROUP
    )  # small steps one by one, larger ones by eights
    names, counts = np.unique(groups, return_counts=True)
    members = [groups == name for name in names[counts >= _FEWEST]]
    sizes = np.array([rows[member].mean() for member in members])
    low, middle, high = (
        np.array([np.percentile(ms[member], percentile) for member in members]) for percentile in (10, 50, 90)
    )
    axes.fill_between(sizes, low, high, color=_STEPS, alpha=0.15, linewidth=0, label="10th to 90th percentile")
    axes.plot(sizes, middle, "o-", color=_STEPS, markersize=4, linewidth=1.2, label="median")
    axes.set(xlabel="rows in the step (slots in use)", ylabel="ms of a step", ylim=(0, None), xlim=(0, None))
    _clean(axes)
    axes.legend(frameon=False, loc="upper left")
    return figure


def draw_latencies(result: CaseResult) -> Figure:
    """Which share of the requests had at most a latency, per system."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for axes, (label, pick) in zip(figure.subplots(1, len(LATENCIES), sharey=True), LATENCIES.items(), strict=True):
        for name in result.rounds:
            values = np.sort(pick(result.best(name)))
            shares = 100 * np.arange(1, len(values) + 1) / len(values)
            axes.step(values, shares, where="post", color=COLOURS[name], linewidth=1.8, label=name)
        axes.set(xscale="log", ylim=(0, 100), xlabel=f"{label}, ms" + (" per token" if label != "TTFT" else ""))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        _clean(axes, grid="both")
    figure.axes[0].set_ylabel("% of requests")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    return figure


def draw_sweep(points: Sequence[SweepPoint]) -> Figure:
    """Tokens per second by the number of slots, and the ratios of steps and of time."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    speed, ratios = figure.subplots(1, 2)
    slots = [point.num_slots for point in points]
    for name in (STATIC, CONTINUOUS):
        speeds = [[case_run.tokens_per_s for case_run in point.result.rounds[name]] for point in points]
        best = [max(values) for values in speeds]
        speed.fill_between(slots, [min(v) for v in speeds], best, color=COLOURS[name], alpha=0.15, linewidth=0)
        speed.plot(slots, best, "o-", color=COLOURS[name], linewidth=1.8, label=name)
    speed.set(ylabel="output tokens per second", ylim=(0, None))
    columns = {
        "steps of the engine": (_STEPS, "o-", [point.result.step_ratio for point in points]),
        "steps of slots alone": (_SIMULATED, "x", [point.result.simulated_step_ratio for point in points]),
        "wall-clock time": (_TIME, "o-", [point.result.time_ratio().best for point in points]),
    }
    for label, (colour, style, values) in columns.items():
        ratios.plot(slots, values, style, color=colour, linewidth=1.8, markeredgewidth=1.8, label=label)
    ratios.axhline(1, color=INK, linewidth=1)
    ratios.set(ylabel="static over continuous")
    for axes in (speed, ratios):
        axes.set(xscale="log", xlabel="slots (max_num_seqs)")
        axes.xaxis.set_major_locator(FixedLocator(slots))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(frameon=False)
        _clean(axes, grid="both")
    return figure


def _clean(axes: "Axes", grid: str = "x") -> None:
    """Frames and grid that stay behind the figures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GRID, linewidth=0.6)  # type: ignore[arg-type]
