"""Results of a run so far, written to a file line by line, so that an interrupted run keeps what it has measured.

One JSON object per line, each with one key: `result`, `left_out`, `problem` or `raw`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.bench.report import Result


class Journal:
    """Results, cases left out for lack of time, problems, and raw samples.

    Args:
        path: file to append to; None keeps everything in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.results: list[Result] = []
        self.left_out: list[str] = []
        self.problems: list[str] = []
        self.raw: dict[str, Any] = {}

    def add(self, result: Result) -> None:
        """Adds a measured result."""
        self.results.append(result)
        self._write("result", result.as_json())

    def leave_out(self, what: str) -> None:
        """Adds a case that did not fit into the budget."""
        self.left_out.append(what)
        self._write("left_out", what)

    def fail(self, what: str) -> None:
        """Adds a problem: a case that failed or whose result was wrong."""
        self.problems.append(what)
        self._write("problem", what)

    def keep(self, raw: Mapping[str, Any]) -> None:
        """Adds raw samples and what is needed to judge them."""
        self.raw.update(raw)
        self._write("raw", dict(raw))

    def absorb(self, path: Path) -> None:
        """Adds the entries of another process's journal; ignores a last line that is cut off."""
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                ((key, value),) = json.loads(line).items()
            except ValueError:
                continue
            if key == "result":
                self.add(Result.from_json(value))
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
