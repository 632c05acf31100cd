"""One measured figure beside its goal and its floor, and tables of them for a terminal and for Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

HEADER = ("id", "figure", "goal", "floor", "measured", "fraction", "", "note")
_RIGHT = frozenset({2, 3, 4, 5})


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured.

    Attributes:
        goal_id: of the goal it answers to, such as "G10"; "" for none.
        what: what exactly was measured.
        measured: the value.
        unit: of measured, goal and floor.
        less_is_better: whether goal and floor are bounds from above, as for times.
        goal: None for a figure that is only reported.
        floor: the physical limit, from rates measured in the same run; None where there is none.
        note: spread, method, what else must be known to read it.
    """

    goal_id: str
    what: str
    measured: float
    unit: str
    less_is_better: bool = False
    goal: float | None = None
    floor: float | None = None
    note: str = ""

    @property
    def fraction(self) -> float | None:
        """How much of the floor was reached, 1 at best; None without a floor."""
        if self.floor is None or not self.floor or not self.measured:
            return None
        return self.floor / self.measured if self.less_is_better else self.measured / self.floor

    @property
    def met(self) -> bool | None:
        """Whether it is on the good side of its goal; None without one."""
        if self.goal is None:
            return None
        return self.measured <= self.goal if self.less_is_better else self.measured >= self.goal

    def as_json(self) -> dict[str, Any]:
        """As a file holds it."""
        return asdict(self) | {"fraction": self.fraction, "met": self.met}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Figure":
        """What `as_json` made."""
        return cls(**{name: value for name, value in saved.items() if name not in ("fraction", "met")})


def text_table(figures: Sequence[Figure]) -> str:
    """Aligned, one line each."""
    rows = [HEADER, *map(_cells, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(figures: Sequence[Figure]) -> str:
    """The same for a document."""
    rules = ["---:" if column in _RIGHT else "---" for column in range(len(HEADER))]
    rows = [HEADER, tuple(rules), *map(_cells, figures)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _cells(figure: Figure) -> tuple[str, ...]:
    sign = "<=" if figure.less_is_better else ">="
    fraction = figure.fraction
    return (
        figure.goal_id,
        figure.what,
        "" if figure.goal is None else f"{sign} {number(figure.goal)}",
        "" if figure.floor is None else number(figure.floor),
        f"{number(figure.measured)} {figure.unit}".rstrip(),
        "" if fraction is None else f"{100 * fraction:.1f} %",
        "" if figure.met is None else "met" if figure.met else "MISSED",
        figure.note,
    )


def number(value: float) -> str:
    """Three digits that count, or all that stand before the point."""
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
