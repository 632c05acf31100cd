"""What a benchmark says: a table for people, and a JSON file with every raw sample for those who doubt it."""

import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Direction = Literal["at least", "at most"]


@dataclass(frozen=True, slots=True)
class Result:
    """One figure beside its goal.

    Attributes:
        benchmark_id: such as "C3".
        what: what the figure is of, in a few words.
        figure: as measured.
        unit: of figure, goal and floor; "x" for a ratio, "" for a count.
        goal: None for a figure that is only reported.
        direction: on which side of the goal is good.
        floor: the physical limit or the simulated ideal, where there is one: nobody does better.
        note: the range of samples, or why the goal is missed.
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
        """Whether the figure is on the goal's good side; one without a goal always is."""
        if self.goal is None:
            return True
        return self.figure >= self.goal if self.direction == "at least" else self.figure <= self.goal


def format_table(results: Sequence[Result]) -> str:
    """The results as aligned text, one line each."""
    rows = [("id", "what", "figure", "goal", "limit", "", "note")]
    for result in results:
        goal = "" if result.goal is None else f"{_SIGNS[result.direction]} {_number(result.goal)}"
        floor = "" if result.floor is None else _number(result.floor)
        verdict = "" if result.goal is None else "met" if result.met else "MISSED"
        figure = f"{_number(result.figure)} {result.unit}".rstrip()
        rows.append((result.benchmark_id, result.what, figure, goal, floor, verdict, result.note))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_report(
    out: Path,
    name: str,
    *,
    results: Sequence[Result],
    raw: Mapping[str, object],
    machine: Mapping[str, object],
    arguments: Mapping[str, object],
) -> Path:
    """Writes one JSON file, named after the benchmark and the time, with everything needed to judge the figures.

    Args:
        out: folder; made if it is not there.
        name: of the benchmark.
        results: the table.
        raw: every sample.
        machine: the hardware, its measured floors and the versions of the software.
        arguments: of the command line.
    Returns: the file.
    """
    now = datetime.datetime.now(datetime.UTC)
    report = {
        "benchmark": name,
        "time": now.isoformat(timespec="seconds"),
        "revision": git_revision(),
        "arguments": arguments,
        "machine": machine,
        "results": [{**asdict(result), "met": result.met} for result in results],
        "raw": raw,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{now:%Y%m%d-%H%M%S-%f}.json"
    path.write_text(json.dumps(report) + "\n")
    return path


def git_revision(folder: Path = Path(__file__).parent) -> str:
    """The commit of the sources, "-dirty" appended when they differ from it; "" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


_SIGNS: Mapping[Direction, str] = {"at least": ">=", "at most": "<="}
_RIGHT = frozenset({2, 3, 4})


def _number(value: float) -> str:
    """Three digits that count, or all that stand before the point."""
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
