"""What a benchmark is: a name, the goals it answers to, and a function from settings to results."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.bench.report import Result


class BenchmarkError(Exception):
    """The figures would mean nothing: outputs differ, or something that is needed is missing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a benchmark is run.

    Attributes:
        rounds: turns of every contestant.
        quick: sizes so small that the figures mean nothing: shows that the benchmark works.
        threads: CPU threads for every contestant.
        scratch: an empty folder that is removed afterwards: checkpoints and the like.
        floors: what the CPU could do, measured just before; NaN where the benchmark has no use for it.
        progress: told what is being done, for people.
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
    """What came out.

    Attributes:
        results: the rows of the table.
        raw: every sample behind them, as JSON can hold it; empty if nothing was measured, and no report is written.
        text: more for people to read, below the table.
        table: shown instead of the usual one.
        problems: what could not be measured, or was wrong: shown last, and the command fails.
    """

    results: tuple[Result, ...]
    raw: Mapping[str, object]
    text: str = ""
    table: str | None = None
    problems: tuple[str, ...] = ()


def positive(text: str) -> int:
    """A number on the command line that must be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module's `BENCHMARK`; the claim, the goal and the method are in the module's docstring.

    Attributes:
        name: as typed on the command line.
        ids: of the goals it answers to, such as ("C1",); each also works as a name.
        summary: one line for `list`.
        run: measures; raises BenchmarkError where the figures would mean nothing.
        add_arguments: adds flags of its own, found in `Settings.options`.
        has_cpu_floors: whether `Settings.floors` shall be measured.
    """

    name: str
    ids: tuple[str, ...]
    summary: str
    run: Callable[[Settings], Outcome]
    add_arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    has_cpu_floors: bool = True
