"""Reads the engine's step log (`--step-log`): the shape and the duration of every step.

The log says how many tokens each request got, not how many it had before. These are counted here: from its cached
prefix, which its `usage` states when it ends. A request is not known

- without `usage`: the end of the log cut it off;
- after it was preempted: what it finds in the cache when it resumes is not logged;
- after its first row with drafts: how many of them were right is not logged;
- after lines were dropped while it was in flight, and if it may have begun in them: it ends with other tokens than
  its rows had.

Steps with such a request are left out and counted.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from engine.core.latency.step_time import StepShape
from loadgen.errors import TraceError
from loadgen.step_log import Step, Usage, parse_step


class TimedStep(NamedTuple):
    """A step and its duration in seconds: until the next one began if requests were left, else until its update ended.

    Between two steps the engine sends results and takes submissions, and both of its threads want the interpreter.
    """

    shape: StepShape
    seconds: float


class StepLog(NamedTuple):
    """The steps of a log with rows, in order, and how many others had to be left out."""

    steps: tuple[TimedStep, ...]
    num_left_out: int


def read_step_log(path: Path) -> StepLog:
    """Returns the steps of a file.

    Raises: TraceError: the file cannot be read, or a line is no step; names the line and the field.
    """
    try:
        with path.open(encoding="utf-8") as file:
            records = list(_records(file))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 at byte {error.start}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    return _steps(records)


def _records(lines: Iterable[str]) -> Iterator[Step]:
    for number, line in enumerate(lines, 1):
        try:
            yield parse_step(line)
        except ValueError as error:
            raise TraceError(f"line {number} is no line of --step-log: {error}") from error


def _steps(records: list[Step]) -> StepLog:
    lives = _lives(records)
    computed: dict[tuple[int, int], int | None] = {}
    steps, num_left_out = [], 0
    for record, life, seconds in zip(records, lives, _durations(records, lives), strict=True):
        if record.num_dropped:
            computed = dict.fromkeys(computed)  # None: not known any more
        num_tokens = num_kv_tokens = num_pairs = 0
        is_known = True
        for request_id, count in record.rows.items():
            key, usage = (request_id, life.number), life.usage.get(request_id)
            before = None if usage is None else computed.get(key, usage.cached)
            num_tokens += count
            if usage is None or before is None:
                is_known = False
                continue
            if count == 1:
                num_kv_tokens += before + 1
            else:
                num_pairs += count * before + count * (count + 1) // 2
            has_drafts = count > 1 and before >= usage.prompt
            computed[key] = None if has_drafts else before + count
        for request_id in record.preempted:
            computed[request_id, life.number] = None
        if not record.rows:
            continue
        if is_known and seconds > 0:
            shape = StepShape(num_tokens, len(record.rows), num_kv_tokens, num_pairs)
            steps.append(TimedStep(shape, seconds))
        else:
            num_left_out += 1
    return StepLog(tuple(steps), num_left_out)


def _durations(records: list[Step], lives: "list[_Life]") -> Iterator[float]:
    """The seconds of each step, see `TimedStep`."""
    for index, record in enumerate(records):
        following = records[index + 1] if index + 1 < len(records) else None
        is_followed = record.running or record.waiting  # requests are left, so that the next step begins at once
        if following is None or not is_followed or following.num_dropped or lives[index + 1] is not lives[index]:
            yield record.busy_ms / 1e3
        else:
            yield max(record.busy_ms, following.started_ms - record.started_ms) / 1e3


class _Life(NamedTuple):
    """One start of the engine: the file is appended to, and request ids begin anew."""

    number: int
    usage: dict[int, Usage]  # of requests that ended and whose rows are all there, as far as is known


def _lives(records: list[Step]) -> list[_Life]:
    """The life of each record."""
    lives: list[_Life] = []
    life, last_step, has_gap = _Life(0, {}), 0, False
    num_scheduled: dict[int, int] = {}
    after_gap: set[int] = set()
    for record in records:
        if record.number < last_step:
            life, has_gap = _Life(life.number + 1, {}), False
            num_scheduled, after_gap = {}, set()
        last_step = record.number
        has_gap |= record.num_dropped > 0
        for request_id, count in record.rows.items():
            if has_gap and request_id not in num_scheduled:
                after_gap.add(request_id)
            num_scheduled[request_id] = num_scheduled.get(request_id, 0) + count
        for request_id, usage in record.finished.items():
            if request_id not in after_gap or num_scheduled[request_id] == usage.num_scheduled:
                life.usage[request_id] = usage
        lives.append(life)
    return lives
