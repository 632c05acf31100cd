"""Result of one check of a run."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Level = Literal["VALID", "DEGRADED", "INVALID"]
LEVELS: tuple[Level, ...] = ("VALID", "DEGRADED", "INVALID")
"""From good to bad."""


class Bounds(NamedTuple):
    """Above `degraded` a figure makes the run DEGRADED, above `invalid` INVALID (None: it never does)."""

    degraded: float
    invalid: float | None = None

    def level(self, measured: float) -> Level:
        """Returns the level of a figure; NaN (nothing measured) is VALID."""
        if self.invalid is not None and measured > self.invalid:
            return "INVALID"
        return "DEGRADED" if measured > self.degraded else "VALID"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    Attributes:
        check: its key, as in result.json.
        title: what is measured, in reports.
        level: VALID when it passed or could not be judged.
        measured: NaN when it could not be judged.
        bounds: None for a check that is a yes or no.
        unit: "ms", "share" or "".
        text: what it means and what to do; of a passed check "", a remark, or why it was not judged.
        judged: whether it could be.
    """

    check: str
    title: str
    level: Level
    measured: float
    bounds: Bounds | None
    unit: str
    text: str
    judged: bool = True

    @property
    def measured_text(self) -> str:
        """Returns the figure with its unit; "-" when there is none."""
        return figure(self.measured, self.unit)

    @property
    def sentence(self) -> str:
        """Returns the title, the figure with its limits, and what it means."""
        measured = "" if self.bounds is None else f" {self.measured_text} (limit {self.bounds_text})"
        return f"{self.title}{measured}: {self.text}"

    @property
    def bounds_text(self) -> str:
        """Returns the limits with their unit."""
        if self.bounds is None:
            return ""
        limits = [limit for limit in self.bounds if limit is not None]
        return " / ".join(figure(limit, self.unit) for limit in limits)


def figure(value: float, unit: str) -> str:
    """Returns a figure as text: shares in percent, three digits."""
    if math.isnan(value):
        return "-"
    if unit == "share":
        return f"{100 * value:.3g} %"
    return f"{value:.3g} {unit}".rstrip()


def bounded(check: str, title: str, measured: float, bounds: Bounds, unit: str, text: str) -> Finding:
    """Returns the finding of a figure with bounds; `text` is the advice if it exceeds one."""
    level = bounds.level(measured)
    if math.isnan(measured):
        return not_judged(check, title, bounds, unit, "the run has no such figure")
    return Finding(check, title, level, measured, bounds, unit, "" if level == "VALID" else text)


def not_judged(check: str, title: str, bounds: Bounds | None, unit: str, why: str) -> Finding:
    """Returns the finding of a check that does not apply."""
    return Finding(check, title, "VALID", math.nan, bounds, unit, f"not judged: {why}", judged=False)


def yes_or_no(check: str, title: str, level: Level, text: str) -> Finding:
    """Returns the finding of a check without a figure: passed if there is no text, else this level."""
    return Finding(check, title, level if text else "VALID", math.nan, None, "", text)
