"""Reads an engine's `--step-log`: which requests had rows in which step, and how long the step took.

One JSON object per line, see `engine/serving/step_log.py`. Reading continues where it last ended, so that several
runs can share one log; a line that is still being written is left for the next time.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from loadgen.errors import ResultError


class Usage(NamedTuple):
    """Tokens of a request that has finished. `cached` of the `prompt` came from the prefix cache."""

    prompt: int
    cached: int
    output: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step with rows.

    Attributes:
        started_ms: CLOCK_MONOTONIC.
        busy_ms: scheduling, computing and updating.
        rows: tokens computed for each request.
        finished: requests whose last token this step yielded (or that were cut off), with their usage.
        preempted: requests that lost their slot before it.
        waiting: requests without a slot after it.
        running: requests with a slot after it, those that finished in it not among them.
    """

    started_ms: float
    busy_ms: float
    rows: Mapping[int, int]
    finished: Mapping[int, Usage]
    preempted: tuple[int, ...]
    waiting: int
    running: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(self.rows.values())


class Reading(NamedTuple):
    """Steps read, and the byte at which the next reading begins."""

    steps: list[Step]
    end: int


def read_steps(path: Path, begin: int = 0) -> Reading:
    """Reads the lines that are complete, from a byte on; turns of the engine without rows are left out.

    Args:
        path: the log.
        begin: where a line begins: the `end` of an earlier reading.
    Raises: ResultError: the file cannot be read, a line is not what the engine writes (names it), or lines are missing.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            text = file.read()
    except OSError as error:
        raise ResultError(f"step log {path}: {error.strerror}") from error
    whole = text[: text.rfind(b"\n") + 1]
    steps = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            step = _step(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise ResultError(f"step log {path}, line {number} after byte {begin}: {what}") from error
        if step.rows:
            steps.append(step)
    return Reading(steps, begin + len(whole))


def _step(record: Mapping[str, Any]) -> Step:
    if lost := record.get("dropped"):
        raise ValueError(f"the engine could not write {lost} steps before it: its disk is too slow for a step log")
    finished = {int(request): Usage(*map(int, tokens)) for request, tokens in record["usage"].items()}
    if finished.keys() != {int(request) for request in record["finished"]}:
        raise ValueError("`usage` and `finished` name different requests")
    rows = {int(request): int(tokens) for request, tokens in record["scheduled"].items()}
    if min(rows.values(), default=1) < 1:
        raise ValueError("a row without tokens")
    return Step(
        started_ms=float(record["t_ms"]),
        busy_ms=float(record["schedule_ms"]) + float(record["execute_ms"]) + float(record["update_ms"]),
        rows=rows,
        finished=finished,
        preempted=tuple(map(int, record["preempted"])),
        waiting=int(record["waiting"]),
        running=int(record["running"]),
    )
