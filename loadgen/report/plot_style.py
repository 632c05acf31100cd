"""How every picture looks: one palette, quiet axes, names beside what they name instead of in a legend.

Colours are roles. In the page each becomes a CSS variable, so that pictures follow a dark background as text does.
"""

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from loadgen.report.figures import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID, SURFACE = "#1f2428", "#69727d", "#dfe3e8", "#fefefe"
BLUE, ORANGE, TEAL, RED, GREY, VIOLET = "#2b6cb0", "#d0782a", "#2a8a7e", "#c0392f", "#a3abb5", "#8a63b3"
SHADE = "#f1f3f6"
ROLES = {
    INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface", SHADE: "shade",
    BLUE: "blue", ORANGE: "orange", TEAL: "teal", RED: "red", GREY: "grey", VIOLET: "violet",
}  # fmt: skip
"""Colour to the name of its CSS variable, which templates/report.css defines for light and dark."""

WIDTH_IN = 9.6
_PNG_DPI = 150
# Of ticks on a logarithmic axis; the first with few enough ticks is taken.
_LEADING_DIGITS = ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))
_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "figure.facecolor": SURFACE,
    "svg.fonttype": "none",
    "svg.hashsalt": "chairlift-loadgen",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished picture.

    Attributes:
        name: of its file and its anchor, such as "timeline".
        title: a few words.
        caption: what is shown, and what was left out.
        alt: what it says, for those who cannot see it.
        figure: the drawing.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside this."""
    with rc_context(_RC):
        yield


def new_figure(height_in: float) -> Figure:
    """An empty figure of the width all have; belongs to no window and no global state."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def headline(axes: "Axes", *parts: tuple[str, str]) -> None:
    """Words above the axes, each in the colour of what it names: the title, and the legend in one."""
    above = ScaledTranslation(0, 6 / 72, axes.figure.dpi_scale_trans)
    areas: list[Artist] = [
        TextArea(text, textprops={"color": colour, "fontweight": "bold" if index == 0 else "normal", "fontsize": 9.5})
        for index, (text, colour) in enumerate(parts)
    ]
    box = AnchoredOffsetbox(
        "lower left",
        child=HPacker(children=areas, pad=0, sep=9, align="baseline"),
        pad=0,
        borderpad=0,
        frameon=False,
        bbox_to_anchor=(0, 1),
        bbox_transform=axes.transAxes + above,
    )
    axes.add_artist(box)


def log_time(axis: Any, low_ms: float, high_ms: float, *, most_ticks: int = 8) -> None:
    """A logarithmic axis of milliseconds, its ticks with units: as many round figures as there is room for."""
    ticks: list[float] = []
    for leading in _LEADING_DIGITS:
        decades = range(math.floor(math.log10(low_ms)), math.ceil(math.log10(high_ms)) + 1)
        ticks = [digit * 10.0**decade for decade in decades for digit in leading]
        ticks = [tick for tick in ticks if low_ms <= tick <= high_ms]
        if len(ticks) <= most_ticks:
            break
    ticks = ticks[:: -(-len(ticks) // most_ticks) or 1]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))


def png(picture: Picture) -> bytes:
    """The picture as PNG."""
    target = io.BytesIO()
    with styled():
        picture.figure.savefig(target, format="png", dpi=_PNG_DPI, metadata={"Title": picture.title, "Software": None})
    return target.getvalue()


def svg(picture: Picture) -> str:
    """The picture as an SVG element to stand in a page: text stays text, colours are the page's variables."""
    target = io.StringIO()
    with styled():
        picture.figure.savefig(
            target,
            format="svg",
            dpi=72,
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-labelledby="{picture.name}-alt">',
        text,
    )
    text = re.sub(r'\bid="', f'id="{picture.name}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{picture.name}-", text)
    for colour, role in ROLES.items():
        text = text.replace(colour, f"var(--{role})")
    return text
