"""Definition of a benchmark: a name, goals, and a function from settings to results."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The `BENCHMARK` of a module, whose docstring has the claim, the goal and the method.

    Attributes:
        name: name on the command line.
        ids: ids of its goals, such as ("C1",); each is an alias of the name.
        summary: one line for `list`.
        run: measures; raises BenchmarkError where the figures would mean nothing.
        add_arguments: adds its flags; their values are in `Settings.options`.
        has_cpu_floors: whether to measure `Settings.floors`.
    """

    name: str
    ids: tuple[str, ...]
    summary: str
    run: Callable[[Settings], Outcome]
    add_arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    has_cpu_floors: bool = True
