"""Reports of benchmarks: results as a table (text or Markdown), and a JSON file with every raw sample."""

import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

Direction = Literal["at least", "at most"]


@dataclass(frozen=True, slots=True)
class Result:
    """One figure beside its goal and its floor.

    Attributes:
        benchmark_id: id of the goal, such as "C3"; "" for none.
        what: what was measured.
        figure: measured value.
        unit: of figure, goal and floor; "x" for a ratio, "" for a count.
        goal: None for a figure that is only reported.
        direction: side of the goal and the floor on which the figure should be.
        floor: the physical limit or the simulated ideal; None where there is none.
        note: range of the samples, method, or the reason for a missed goal.
    """

    benchmark_id: str
    what: str
    figure: float
    unit: str = ""
    goal: float | None = None
    direction: Direction = "at least"
    floor: float | None = None
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the figure reaches its goal; True without a goal."""
        if self.goal is None:
            return True
        return self.figure >= self.goal if self.direction == "at least" else self.figure <= self.goal

    @property
    def fraction(self) -> float | None:
        """Part of the floor that was reached, 1 at best; None without a floor."""
        if not self.floor or not self.figure:
            return None
        return self.figure / self.floor if self.direction == "at least" else self.floor / self.figure

    def as_json(self) -> dict[str, Any]:
        """Returns the fields and what follows from them."""
        return asdict(self) | {"fraction": self.fraction, "met": self.met}

    def beside(self, other: "Result", name: str) -> "Result":
        """Returns this result with a note: its fraction of the floor over that of another result of the same run."""
        if self.fraction is None or other.fraction is None:
            return self
        ratio = f"{self.fraction / other.fraction:.2f}x the fraction of {name}"
        return replace(self, note="; ".join(filter(None, (ratio, self.note))))

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Result":
        """Restores what `as_json` returned."""
        return cls(**{name: value for name, value in saved.items() if name not in ("fraction", "met")})


def format_table(results: Sequence[Result]) -> str:
    """Formats results as aligned text, one line each."""
    rows = [_HEADER, *map(_cells, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(results: Sequence[Result]) -> str:
    """Formats results as a Markdown table."""
    rules = tuple("---:" if column in _RIGHT else "---" for column in range(len(_HEADER)))
    rows = [_HEADER, rules, *map(_cells, results)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def format_number(value: float) -> str:
    """Formats a number with three significant digits, or all digits before the point."""
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def write_report(
    out: Path,
    name: str,
    *,
    results: Sequence[Result],
    raw: Mapping[str, object],
    machine: Mapping[str, object],
    arguments: Mapping[str, object],
) -> Path:
    """Writes results, raw samples, machine, commit and arguments to a JSON file named after the benchmark and the time.

    Args:
        out: folder; created if missing.
        name: name of the benchmark.
        results: the table.
        raw: every sample.
        machine: the hardware, its measured floors and the versions of the software.
        arguments: arguments of the command line.
    Returns: the path of the file.
    """
    now = datetime.datetime.now(datetime.UTC)
    report = {
        "benchmark": name,
        "time": now.isoformat(timespec="seconds"),
        "revision": git_revision(),
        "arguments": arguments,
        "machine": machine,
        "results": [result.as_json() for result in results],
        "raw": raw,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{now:%Y%m%d-%H%M%S-%f}.json"
    path.write_text(json.dumps(report) + "\n")
    return path


def git_revision(folder: Path = Path(__file__).parent) -> str:
    """Returns the commit of the sources, with "-dirty" appended if they differ from it; "" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


_HEADER = ("id", "what", "figure", "goal", "floor", "fraction", "", "note")
_RIGHT = frozenset({2, 3, 4, 5})
_SIGNS: Mapping[Direction, str] = {"at least": ">=", "at most": "<="}


def _cells(result: Result) -> tuple[str, ...]:
    return (
        result.benchmark_id,
        result.what,
        f"{format_number(result.figure)} {result.unit}".rstrip(),
        "" if result.goal is None else f"{_SIGNS[result.direction]} {format_number(result.goal)}",
        "" if result.floor is None else format_number(result.floor),
        "" if result.fraction is None else f"{100 * result.fraction:.1f} %",
        "" if result.goal is None else "met" if result.met else "MISSED",
        result.note,
    )
