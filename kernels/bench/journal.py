"""What a run has found so far: kept in a file line by line, so that a run that ends early has not measured for nothing.

One JSON object per line, each with one key: `figure`, `left_out`, `problem` or `raw`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels.bench.figure import Figure


class Journal:
    """Figures, what was left out for want of time, what went wrong, and raw samples.

    Args:
        path: file to append to; None keeps everything in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.figures: list[Figure] = []
        self.left_out: list[str] = []
        self.problems: list[str] = []
        self.raw: dict[str, Any] = {}

    def add(self, figure: Figure) -> None:
        """Something was measured."""
        self.figures.append(figure)
        self._write("figure", figure.as_json())

    def leave_out(self, what: str) -> None:
        """Something did not fit into the budget."""
        self.left_out.append(what)
        self._write("left_out", what)

    def fail(self, what: str) -> None:
        """Something could not be measured, or its result was wrong."""
        self.problems.append(what)
        self._write("problem", what)

    def keep(self, raw: Mapping[str, Any]) -> None:
        """Raw samples, and whatever is needed to judge them."""
        self.raw.update(raw)
        self._write("raw", dict(raw))

    def absorb(self, path: Path) -> None:
        """Takes over what another process wrote into its own journal; a last line that was cut off is passed over."""
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                ((key, value),) = json.loads(line).items()
            except ValueError:
                continue
            if key == "figure":
                self.add(Figure.from_json(value))
            elif key == "left_out":
                self.leave_out(value)
            elif key == "problem":
                self.fail(value)
            else:
                self.keep(value)

    def _write(self, key: str, value: object) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({key: value}) + "\n")
