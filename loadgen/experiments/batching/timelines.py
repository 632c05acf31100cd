"""Draws slot occupancy, at which step: one row per slot, steps from left to right, a colour per request, idle is white.

Colours run through the queue from its first request to its last, neighbours in it differ in lightness: a static batch
has one hue, and one that is refilled all the time shows the queue going by.
"""

from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from loadgen.experiments.batching.policies import CONTINUOUS, STATIC
from loadgen.experiments.batching.results import CaseResult
from loadgen.experiments.batching.slots import SlotUse
from loadgen.report.palette import GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

_ZOOM_FROM = 3.0  # times as many steps, from which the shorter run is drawn a second time at its own scale
_WHITENED = (0.08, 0.42, 0.25)  # shares of white, in turn


def draw_timelines(result: CaseResult) -> Figure:
    """Both policies on one scale of steps, and again at the scale of the continuous run where that is much shorter."""
    uses = {name: result.best(name).slot_use for name in (STATIC, CONTINUOUS)}
    longest = max(slot_use.num_steps for slot_use in uses.values())
    ends = [longest]
    if result.step_ratio > _ZOOM_FROM:
        ends.append(uses[CONTINUOUS].num_steps)
    figure = Figure(figsize=(12, 0.9 + 4.8 * len(ends)), layout="constrained")
    panels = iter(figure.subplots(2 * len(ends), 1))
    for end in ends:
        for name, slot_use in uses.items():
            axes = next(panels)
            _draw_slots(axes, slot_use, end)
            note = f"{100 * slot_use.utilisation:.1f} % of the slots in use"
            if end < longest:
                note = "the same at its own scale" if end == slot_use.num_steps else f"the first {end:,} of them"
            axes.set_title(f"{name}: {slot_use.num_steps:,} steps, {note}", loc="left", fontsize=11, color=INK)
        axes.set_xlabel("step", color=INK)
    figure.suptitle(result.case.title, fontsize=13, color=INK, x=0.01, ha="left")
    return figure


def _draw_slots(axes: "Axes", slot_use: SlotUse, end: int) -> None:
    """The occupancies that begin before a step, as pixels: thousands of them would make a drawing of megabytes."""
    colours = _colours(slot_use)
    shown = [occupancy for occupancy in slot_use.occupancies if occupancy.begin < end]
    boxes = np.array([[s.begin, s.slot, min(s.end, end), s.slot + 1] for s in shown])
    corners = np.stack([boxes[:, [0, 1]], boxes[:, [2, 1]], boxes[:, [2, 3]], boxes[:, [0, 3]]], axis=1)
    axes.add_collection(
        PolyCollection(
            list(corners),
            facecolors=[colours[s.request] for s in shown],
            linewidths=0,
            antialiased=False,
            rasterized=True,
        )
    )
    axes.set(xlim=(0, end), ylim=(slot_use.num_slots, 0), ylabel="slot")
    if end > slot_use.num_steps:
        axes.axvline(slot_use.num_steps, color=INK, linewidth=1, linestyle=":")
        is_near_edge = slot_use.num_steps > 0.8 * end
        axes.annotate(
            f"done at step {slot_use.num_steps:,}",
            (slot_use.num_steps, 0.9 * slot_use.num_slots),
            xytext=(-6 if is_near_edge else 6, 0),
            textcoords="offset points",
            va="center",
            ha="right" if is_near_edge else "left",
            fontsize=10,
            color=INK,
        )
    axes.spines[["top", "right"]].set_color(GRID)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _colours(slot_use: SlotUse) -> "dict[int, NDArray[np.float64]]":
    """By request; one that runs down again keeps its colour."""
    requests = sorted({occupancy.request for occupancy in slot_use.occupancies})
    hues = mpl.colormaps["turbo"](np.linspace(0.06, 0.94, len(requests)))[:, :3]  # [requests, red green blue]
    white = np.resize(_WHITENED, len(requests))[:, None]
    return dict(zip(requests, hues * (1 - white) + white, strict=True))
