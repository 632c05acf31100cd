"""Lines of an engine's `--step-log`, one JSON object each; see `engine/serving/step_log.py`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """Tokens of a request that has finished. `cached` of the `prompt` came from the prefix cache."""

    prompt: int
    cached: int
    output: int

    @property
    def num_scheduled(self) -> int:
        """Tokens of all its rows: without those of the cached prefix, and without the last one of the answer."""
        return self.prompt - self.cached + max(self.output, 1) - 1


@dataclass(frozen=True, slots=True)
class Step:
    """One step, or a turn of the engine without rows.

    Attributes:
        started_ms: CLOCK_MONOTONIC.
        busy_ms: scheduling, computing and updating.
        rows: tokens computed for each request.
        finished: requests whose last token this step yielded (or that were cut off), with their usage.
        preempted: requests that lost their slot before it.
        waiting: requests without a slot after it.
        running: requests with a slot after it, those that finished in it not among them.
        number: of the step, from 1; turns without rows repeat it.
        num_dropped: lines before it that the engine could not write.
    """

    started_ms: float
    busy_ms: float
    rows: Mapping[int, int]
    finished: Mapping[int, Usage]
    preempted: tuple[int, ...]
    waiting: int
    running: int
    number: int = 0
    num_dropped: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(self.rows.values())


def parse_step(line: str | bytes) -> Step:
    """Returns the step of a line.

    Raises: ValueError: the engine does not write such a line; says why.
    """
    try:
        return _step(json.loads(line))
    except KeyError as error:
        raise ValueError(f"no field {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def _step(record: Mapping[str, Any]) -> Step:
    num_dropped, number = int(record.get("dropped", 0)), int(record["step"])
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
        number=number,
        num_dropped=num_dropped,
    )
