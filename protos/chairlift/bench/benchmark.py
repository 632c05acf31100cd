"""Definition of a benchmark: a name, goals, and a function from settings to results."""

import argparse
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from chairlift.bench.report import Result


class BenchmarkError(Exception):
    """The benchmark cannot give valid figures: outputs differ, or a requirement is missing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run.

    Attributes:
        rounds: measured rounds of every variant.
        quick: use tiny sizes, to test the benchmark; the figures are meaningless.
        threads: CPU threads of every variant.
        scratch: an empty folder for checkpoints and the like, removed afterwards.
        floors: rates of the CPU, measured just before; NaN if the benchmark does not use them.
        progress: called with lines that describe the progress.
        options: the benchmark's own flags, see `Benchmark.add_arguments`.
    """

    rounds: int
    quick: bool
    threads: int
    scratch: Path
    floors: Any
    progress: Callable[[str], None]
    options: argparse.Namespace = field(default_factory=argparse.Namespace)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        results: the rows of the table.
        raw: every sample, as JSON values; if it is empty, no report is written.
        text: printed below the table.
        table: printed instead of the table of results.
        problems: what failed or was wrong; printed last, and the exit status is 1.
    """

    results: tuple[Result, ...]
    raw: Mapping[str, object]
    text: str = ""
    table: str | None = None
    problems: tuple[str, ...] = ()


def positive(text: str) -> int:
    """Parses a number on the command line that must be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {value}, must be at least 1")
    return value


@dataclass(frozen=True, slots=True)
class Benchmark:
    """An entry in a package's list of benchmarks.

    Attributes:
        name: name on the command line.
        ids: ids of its goals, such as ("C1",); each is an alias of the name.
        summary: one line for `list`.
        target: its function, "MODULE" (`run` in it) or "MODULE:FUNCTION", from settings to an outcome; it raises
            BenchmarkError where the figures would mean nothing. The module's docstring has the claim, the goal and the
            method; `add_arguments(parser)` in it adds flags, whose values are in `Settings.options`.
        has_cpu_floors: whether to measure `Settings.floors`.
    """

    name: str
    ids: tuple[str, ...]
    summary: str
    target: str
    has_cpu_floors: bool = True

    def module(self) -> ModuleType:
        """Imports its module."""
        return importlib.import_module(self.target.partition(":")[0])

    def run(self, settings: Settings) -> Outcome:
        """Measures."""
        outcome: Outcome = getattr(self.module(), self.target.partition(":")[2] or "run")(settings)
        return outcome
