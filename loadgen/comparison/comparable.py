"""Checks that runs have the same workload and settings and are valid; if not, which field differs and where.

Pure.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.checks.selfcheck import Verdict
from loadgen.errors import ComparisonError
from loadgen.record import RunData
from loadgen.service_mix import recorded_classes
from loadgen.trace.schema import Blocks, Trace, workload_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

# What decides the load, beside the workload itself.
_LOAD_SETTINGS = (
    "closed_loop", "concurrency", "max_concurrency", "overflow",
    "ignore_eos", "cancel_rate", "timeout_s", "max_retries",
)  # fmt: skip
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Side:
    """Runs of one kind, in the order in which they were run.

    Attributes:
        label: what people call it.
        runs: one, or one for each repeat.
        verdicts: of each run.
    """

    label: str
    runs: tuple[RunData, ...]
    verdicts: tuple[Verdict, ...]


def check_comparable(sides: Sequence[Side], *, force: bool = False) -> tuple[str, ...]:
    """Compares everything with the first run of the first side.

    Args:
        sides: at least two.
        force: go on where runs can be paired at all.
    Returns: what was wrong all the same, to stand in the report.
    Raises: ComparisonError: names the runs, the field and the numbers.
    """
    if len(sides) < 2:
        raise ComparisonError(f"{len(sides)} side to compare: name at least two")
    twice = [label for label, count in Counter(side.label for side in sides).items() if count > 1]
    if twice:
        raise ComparisonError(f"two sides are called {twice[0]!r}: give them labels of their own")
    first = sides[0]
    for side in sides[1:]:
        if len(side.runs) != len(first.runs):
            raise ComparisonError(
                f"{first.label} has {len(first.runs)} runs and {side.label} {len(side.runs)}: give each side as many, "
                "they are compared pair by pair"
            )
    problems = []
    for name, run, verdict in _named_runs(sides):
        ours, theirs = len(first.runs[0].workload), len(run.workload)
        if ours != theirs:
            raise ComparisonError(
                f"requests cannot be paired: {first.label} has {ours} and {name} {theirs}; run both with one workload"
            )
        problems += [f"{text} ({first.label}, {name})" for text in _differences(first.runs[0], run)]
        if run.interrupted:
            problems.append(f"{name} was stopped after {run.ended_s:.1f} s: its tokens/s are of a part of the workload")
        if verdict.level == "INVALID":
            problems.append(f"{name} is INVALID: {verdict.reasons[0].sentence}")
    if problems and not force:
        more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise ComparisonError(
            f"{'; '.join(problems[:_MAX_NAMED])}{more}; run both again alike, or --force a report that says so"
        )
    return tuple(problems)


def _named_runs(sides: Sequence[Side]) -> Iterator[tuple[str, RunData, Verdict]]:
    for side in sides:
        for number, (run, verdict) in enumerate(zip(side.runs, side.verdicts, strict=True), 1):
            yield side.label if len(side.runs) == 1 else f"{side.label}, run {number}", run, verdict


def _differences(first: RunData, other: RunData) -> Iterator[str]:
    """One text for each field that is not the same; both have as many requests."""
    if workload_digest(first.workload) != workload_digest(other.workload):
        yield from _workload_differences(first.workload, other.workload)
    for name in _LOAD_SETTINGS:
        ours, theirs = first.settings.get(name), other.settings.get(name)
        if (ours or None) != (theirs or None):  # runs of before a setting existed lack it
            yield f"{name} differs: {ours} and {theirs}"
    yield from _target_differences(first, other)


def _target_differences(first: RunData, other: RunData) -> Iterator[str]:
    """Latency targets decide which requests a server refuses, and in which order it serves the others."""
    if recorded_classes(first.settings) != recorded_classes(other.settings):
        yield "service_classes differ: requests have other latency targets"
    else:
        ours, theirs = first.requests["service_class"], other.requests["service_class"]
        yield from _column("service_class", ours, theirs, ours, theirs)


def _workload_differences(first: Trace, other: Trace) -> Iterator[str]:
    microseconds = [np.round(trace.arrival_s * 1e6).astype(np.int64) for trace in (first, other)]
    yield from _column("arrival_s", microseconds[0], microseconds[1], first.arrival_s, other.arrival_s)
    for name in ("input_tokens", "output_tokens"):
        ours, theirs = getattr(first, name), getattr(other, name)
        yield from _column(name, ours, theirs, ours, theirs)
    if first.blocks is None or other.blocks is None:
        if first.blocks is not other.blocks:
            yield "blocks differ: only one of them says what prompts share"
    else:
        yield from _block_differences(first.blocks, other.blocks)


def _column(
    name: str,
    ours: "Integers",
    theirs: "Integers",
    shown: "NDArray[np.float64] | Integers",
    shown_too: "NDArray[np.float64] | Integers",
) -> Iterator[str]:
    differing = np.flatnonzero(ours != theirs)
    if len(differing):
        at = int(differing[0])
        yield (
            f"{name} differs in {len(differing)} of {len(ours)} requests, first in request {at}: "
            f"{shown[at]:.10g} and {shown_too[at]:.10g}"
        )


def _block_differences(first: Blocks, other: Blocks) -> Iterator[str]:
    if first.block_tokens != other.block_tokens:
        yield f"block_tokens differs: {first.block_tokens} and {other.block_tokens}"
    number = len(first.offsets) - 1
    differing = [index for index in range(number) if not np.array_equal(first.of(index), other.of(index))]
    if differing:
        yield f"blocks differ in {len(differing)} of {number} requests, first in request {differing[0]}"
