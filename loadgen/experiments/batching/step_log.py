"""Reads an engine's `--step-log`: which requests had rows in which step, and how long the step took.

Reading continues where it last ended, so that several runs can share one log; a line that is still being written is
left for the next time.
"""

from pathlib import Path
from typing import NamedTuple

from loadgen.errors import ResultError
from loadgen.step_log import Step, parse_step


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
            step = parse_step(line)
        except ValueError as error:
            raise ResultError(f"step log {path}, line {number} after byte {begin}: {error}") from error
        if step.num_dropped:
            raise ResultError(
                f"step log {path}, line {number} after byte {begin}: the engine could not write {step.num_dropped} "
                "steps before it: its disk is too slow for a step log"
            )
        if step.rows:
            steps.append(step)
    return Reading(steps, begin + len(whole))
