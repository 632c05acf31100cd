"""How every picture looks: quiet axes, ticks with units, and coloured names above the axes instead of a legend."""

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
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
from loadgen.report.palette import GRID, INK, MUTED, RED, ROLES, SURFACE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

WIDTH_IN = 9.6
_PNG_DPI = 150
# Of ticks on a logarithmic axis; the first with few enough ticks is taken.
_LEADING_DIGITS = ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))
_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # labels and class names may contain dollar signs
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


def log_ticks(
    axis: "Axis", low: float, high: float, text: Callable[[float], str] = duration, *, max_ticks: int = 8
) -> None:
    """Puts as many round ticks on a logarithmic axis as there is room for; by default they are times in ms."""
    ticks: list[float] = []
    for leading in _LEADING_DIGITS:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [tick for decade in decades for digit in leading if low <= (tick := digit * 10.0**decade) <= high]
        if len(ticks) <= max_ticks:
            break
    named_ticks(axis, ticks[:: -(-len(ticks) // max_ticks) or 1], text)


def named_ticks(axis: "Axis", ticks: Sequence[float], text: Callable[[float], str]) -> None:
    """Puts exactly these ticks on an axis."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def percent_axis(axes: "Axes") -> None:
    """Makes the vertical axis one of percent, from 0 to 100."""
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])


def limit_line(draw: Callable[..., object], limit_ms: float) -> tuple[str, str]:
    """Draws a latency limit with `axvline` or `axhline`; returns its part of the headline."""
    draw(limit_ms, color=RED, linewidth=1.2, linestyle=(0, (1, 2)), zorder=1)
    return f"limit {duration(limit_ms)}", RED


def png(picture: Picture) -> bytes:
    """The picture as PNG."""
    target = io.BytesIO()
    with styled():
        picture.figure.savefig(target, format="png", dpi=_PNG_DPI, metadata={"Title": picture.title, "Software": None})
    return target.getvalue()


def svg(picture: Picture, dpi: int = 72) -> str:
    """Returns the picture as an SVG element of a page: text stays text, colours become the page's variables.

    Args:
        picture: what to write.
        dpi: resolution of rasterized parts.
    """
    target = io.StringIO()
    with styled():
        picture.figure.savefig(
            target,
            format="svg",
            dpi=dpi,
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
