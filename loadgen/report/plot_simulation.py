"""Pictures of simulations: goodput against load, and goodput by class at one load."""

import math
from collections.abc import Sequence

from loadgen.report.palette import BLUE, GREY, INK, MUTED, ORANGE, RED, SURFACE, TEAL, VIOLET
from loadgen.report.plot_style import Picture, headline, new_figure, styled
from loadgen.simulation.study import LoadResult

_COLOURS = (TEAL, ORANGE, BLUE, VIOLET, RED, INK, GREY, MUTED)
_MAX_LINES = len(_COLOURS)


def simulation_pictures(studied: Sequence[LoadResult]) -> tuple[Picture, ...]:
    """All of them; goodput against load only where there are several loads."""
    pictures = [by_class(one) for one in studied]
    return (goodput_by_load(studied), *pictures) if len(studied) > 1 else tuple(pictures)


def goodput_by_load(studied: Sequence[LoadResult]) -> Picture:
    """Good requests and good tokens per second, a line for each policy, with the bound on requests."""
    policies = [result.policy for result in studied[0].results]
    with styled():
        figure = new_figure(4.0)
        left, right = figure.subplots(1, 2)
        offered = [one.results[0].offered_per_s for one in studied]
        bound = [one.bound * rate for one, rate in zip(studied, offered, strict=True)]
        left.plot(offered, bound, color=GREY, linestyle=(0, (4, 3)), zorder=1)
        for index in range(len(policies)):
            results = [one.results[index] for one in studied]
            colour = _COLOURS[index % _MAX_LINES]
            style = "-" if index < _MAX_LINES else ":"
            for axes, values in (
                (left, [result.good_requests_per_s for result in results]),
                (right, [result.good_tokens_per_s for result in results]),
            ):
                axes.plot(
                    offered, values, color=colour, linestyle=style, marker="o", markersize=4, markeredgecolor=SURFACE
                )
        for axes, last in (
            (left, [result.good_requests_per_s for result in studied[-1].results]),
            (right, [result.good_tokens_per_s for result in studied[-1].results]),
        ):
            for index, height in enumerate(_spread(last, 0.045 * max(axes.get_ylim()[1], 1e-9))):
                axes.annotate(
                    policies[index], (offered[-1], height), xytext=(6, -3), textcoords="offset points", fontsize=7.5,
                    color=_COLOURS[index % _MAX_LINES], annotation_clip=False,
                )  # fmt: skip
        for axes in (left, right):
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0, right=1.3 * offered[-1])
            axes.set_xlabel("requests offered per second")
        headline(left, ("Good requests per second", INK), ("upper bound", GREY))
        headline(right, ("Good tokens per second", INK))
    return Picture(
        name="simulation-goodput",
        title="Goodput against load",
        caption="Good: complete, and within the targets of its class. Simulated.",
        alt=" ".join(
            f"At {one.results[0].offered_per_s:.3g} requests/s: "
            + ", ".join(f"{result.policy} {result.good_requests_per_s:.3g}" for result in one.results)
            + "."
            for one in studied
        ),
        figure=figure,
    )


def _spread(heights: Sequence[float], distance: float) -> list[float]:
    """Returns heights in the same order that are at least `distance` apart, moved up where they were not."""
    spread = list(heights)
    below = -math.inf
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        below = spread[index] = max(heights[index], below + distance)
    return spread


def by_class(studied: LoadResult) -> Picture:
    """Good requests per second of each policy, its classes side by side in one bar."""
    results = studied.results
    names = [one.name for one in results[0].classes]
    with styled():
        figure = new_figure(0.9 + 0.32 * len(results))
        axes = figure.subplots()
        rows = range(len(results))
        left = [0.0] * len(results)
        for index, _ in enumerate(names):
            widths = [result.classes[index].num_good / result.span_s for result in results]
            axes.barh(rows, widths, left=left, height=0.62, color=_COLOURS[index % _MAX_LINES])
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.axvline(studied.bound * results[0].offered_per_s, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_yticks(rows, [result.policy for result in results])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(f"good requests per second, of {results[0].offered_per_s:.3g} offered")
        parts = [(name, _COLOURS[index % _MAX_LINES]) for index, name in enumerate(names)]
        headline(axes, ("Goodput by class", INK), *parts, ("upper bound", GREY))
    return Picture(
        name=f"simulation-classes-{studied.load:g}x",
        title=f"Goodput by class at load {studied.load:g}",
        caption="Good: complete, and within the targets of its class. Simulated.",
        alt=". ".join(
            f"{result.policy}: "
            + ", ".join(f"{one.name} {100 * one.good_share:.0f} % good" for one in result.classes if one.num_requests)
            for result in results
        )
        + ".",
        figure=figure,
    )
