"""The step log: one JSON line per step.

The step loop only queues the data; a separate thread formats and writes it, mostly while the runner has released the
GIL. See `StepLog.write` for the fields and the cost.
"""

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from queue import Full, Queue
from typing import NamedTuple, TextIO

from engine.core.outputs import RequestOutput, SchedulerOutput
from engine.core.request import RequestId
from engine.errors import ConfigError
from engine.interfaces import LoopSnapshot, StepTimes

MAX_QUEUED_STEPS = 4096
CLOSE_TIMEOUT_S = 5.0
"""How long an engine that ends waits for its last lines to be written."""

# Lines for which a finished request is remembered: the plan that removes it is scheduled right after, and its line
# follows those of the steps in flight.
_REMEMBERED_LINES = 8

_log = logging.getLogger(__name__)


class _Step(NamedTuple):
    plan: SchedulerOutput
    outputs: Sequence[RequestOutput]
    snapshot: LoopSnapshot
    times: StepTimes


class StepLog:
    """Writes steps to a file.

    Bounded: with `MAX_QUEUED_STEPS` steps unwritten (a stuck disk), further ones are dropped and counted in `dropped`
    of the next line.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file for appending.

        Raises: ConfigError: it cannot be opened.
        """
        try:
            self._file: TextIO = path.open("a", encoding="utf-8", buffering=1 << 16)
        except OSError as error:
            raise ConfigError(f"--step-log {path}: {error.strerror}") from error
        self._steps: Queue[_Step | None] = Queue(MAX_QUEUED_STEPS)
        self._num_dropped = 0
        self._finished: deque[set[RequestId]] = deque(maxlen=_REMEMBERED_LINES)
        self._thread = threading.Thread(target=self._write_all, name="step-log", daemon=True)
        self._thread.start()

    def write(
        self, plan: SchedulerOutput, outputs: Sequence[RequestOutput], snapshot: LoopSnapshot, times: StepTimes
    ) -> None:
        """Queues one step; called on the step loop.

        The line holds `step` (of the engine; plans without rows repeat it), `t_ms` (start of the step, perf_counter),
        `schedule_ms`, `execute_ms`, `update_ms` (see `StepTimes`; `schedule_ms` is 0 for a step that was scheduled
        while another ran), `scheduled` {request: tokens}, `num_tokens`, `running`, `waiting`, `finished` {request:
        reason}, `usage` {request: [prompt, cached, output tokens]} of finished requests, `preempted` [request],
        `blocks_used`, `blocks_free`, and `dropped` if earlier lines were lost. `running`, `waiting` and the blocks are
        counted after the step's update, when the next step may have been scheduled. Cost, on one busy core of a 2-core
        machine: 10 us here, and 50 us on the log's thread for a step of 64 rows.
        """
        try:
            self._steps.put_nowait(_Step(plan, outputs, snapshot, times))
        except Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Writes what is queued and closes the file; gives up after `CLOSE_TIMEOUT_S`."""
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        with contextlib.suppress(Full):
            self._steps.put(None, timeout=CLOSE_TIMEOUT_S)
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            _log.error("The step log lost its last lines: they were not written within %g s", CLOSE_TIMEOUT_S)

    def _write_all(self) -> None:
        has_failed = False
        while (step := self._steps.get()) is not None:  # empties the queue even after a failure
            has_failed = has_failed or not self._try_to_write(self._line(step))
        if not has_failed:
            self._try_to_write("")
        with contextlib.suppress(OSError):  # already logged
            self._file.close()

    def _try_to_write(self, line: str) -> bool:
        """Writes a line and flushes if the queue is empty; returns False if that fails."""
        try:
            self._file.write(line)
            if self._steps.empty():
                self._file.flush()
        except OSError as error:
            _log.error("The step log stopped: %s", error.strerror)
            return False
        return True

    def _line(self, step: _Step) -> str:
        plan, stats, times = step.plan, step.snapshot.stats, step.times
        completions = {o.request_id: o.completion for o in step.outputs if o.completion is not None}
        finished = {request_id: completion.reason.name for request_id, completion in completions.items()}
        # A plan removes requests that finished or were cancelled before, and those it preempts.
        self._finished.append(set(finished))
        preempted = [i for i in plan.removed_request_ids if not any(i in line for line in self._finished)]
        record: dict[str, object] = {
            "step": step.snapshot.engine_step,
            "t_ms": round(times.started_ns / 1e6, 3),
            "schedule_ms": round((times.scheduled_ns - times.started_ns) / 1e6, 3),
            "execute_ms": round((times.executed_ns - times.scheduled_ns) / 1e6, 3),
            "update_ms": round((times.updated_ns - times.executed_ns) / 1e6, 3),
            "scheduled": {row.request_id: row.num_scheduled_tokens for row in plan.rows},
            "num_tokens": plan.num_tokens,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "finished": finished,
            "usage": {
                request_id: (done.num_prompt_tokens, done.num_cached_tokens, done.num_output_tokens)
                for request_id, done in completions.items()
            },
            "preempted": preempted,
            "blocks_used": stats.num_blocks - stats.num_free_blocks,
            "blocks_free": stats.num_free_blocks,
        }
        if self._num_dropped:
            record["dropped"], self._num_dropped = self._num_dropped, 0
        return json.dumps(record, separators=(",", ":")) + "\n"
