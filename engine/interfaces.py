"""The interfaces of the step loop: the model runner it drives, the commands it takes and the reports it makes.

Commands and reports are plain data, by request id: no socket and no protobuf crosses this line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from chairlift.service.end_reason import EndReason
from engine.core.outputs import ModelRunnerOutput, RequestOutput, SchedulerOutput, SchedulerStats
from engine.core.request import Request, RequestId
from engine.errors import RequestError


class ModelRunner(Protocol):
    """Runs plans on a model, several at a time if it was made for it.

    `engine.runner.model_runner.TorchModelRunner` is the real one; tests use `FakeModelRunner`.
    """

    def launch(self, plan: SchedulerOutput) -> None:
        """Starts one step. It may still run when this returns, and the next one may be launched meanwhile: up to the
        scheduler's `max_steps_in_flight` of them.

        Args:
            plan: differences since the last plan and the rows of this step; without rows only the differences are
                applied. A plan without rows is collected like any other.
        Raises: EngineError: the whole step failed; the process cannot go on.
        """
        ...

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step launched and not collected.

        Returns: one sampled token per sampling row.
        Raises: EngineError: the whole step failed; the process cannot go on.
        """
        ...


def execute(runner: ModelRunner, plan: SchedulerOutput) -> ModelRunnerOutput:
    """One step from its launch to its end, for those who have no other in flight: warm-up, benchmarks, tests."""
    runner.launch(plan)
    return runner.collect()


@dataclass(frozen=True, slots=True)
class Submit:
    """New requests, already validated.

    Attributes:
        session_id: the stream they came by.
        command_seq: their number on that stream; comes back in `seen_commands` of the reports.
    """

    session_id: str
    command_seq: int
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Requests to stop. Unknown and finished ones are ignored."""

    session_id: str
    command_seq: int
    request_ids: tuple[RequestId, ...]
    reason: EndReason


@dataclass(frozen=True, slots=True)
class GrantCredit:
    """Tokens that requests may generate in addition: pairs of request and number."""

    session_id: str
    command_seq: int
    grants: tuple[tuple[RequestId, int], ...]


Command = Submit | Cancel | GrantCredit


class Inbox:
    """Commands on their way to the step loop: any thread puts, the step loop drains.

    It is bounded by its writers: a session stops reading its stream while `MAX_PENDING_COMMANDS` wait here, and HTTP/2
    flow control then holds the frontend. `SimpleQueue.put` is safe in a signal handler that interrupts `drain` on the
    same thread.
    """

    MAX_PENDING_COMMANDS = 1024

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command | None] = SimpleQueue()

    @property
    def is_full(self) -> bool:
        """Whether writers should wait."""
        return self._queue.qsize() >= self.MAX_PENDING_COMMANDS

    def put(self, command: Command) -> None:
        """Adds a command; never blocks."""
        self._queue.put(command)

    def wake(self) -> None:
        """Ends a `drain` that waits, without a command."""
        self._queue.put(None)

    def drain(self, timeout_s: float) -> list[Command]:
        """Takes all that is there, in order.

        Args:
            timeout_s: how long to wait for something if nothing is there; 0 does not wait.
        Returns: the commands; empty after the timeout or a bare `wake`.
        """
        commands: list[Command] = []
        try:
            item = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
            while True:
                if item is not None:
                    commands.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return commands


class StepTimes(NamedTuple):
    """The borders of a step's parts, perf_counter nanoseconds: scheduling, running, taking in its tokens.

    With two steps in flight a step is scheduled and launched while the one before it runs. Its time then begins, with
    its part in the runner, when that one has been collected: `started_ns` and `scheduled_ns` are the same, and the step
    before is updated in the meantime. Times of steps that follow each other without a pause thus add up to the time
    that has passed, but for these updates, which are counted twice.
    """

    started_ns: int
    scheduled_ns: int
    executed_ns: int
    updated_ns: int

    @property
    def step_us(self) -> int:
        """The whole step."""
        return (self.updated_ns - self.started_ns) // 1000

    @property
    def execute_us(self) -> int:
        """Its part in the runner: from its launch, or from the collection of the step before if that is later, to its
        own collection.
        """
        return (self.executed_ns - self.scheduled_ns) // 1000


class EngineState(Enum):
    """Life of an engine, in this order; FAILED can follow any."""

    LOADING = auto()
    SERVING = auto()
    DRAINING = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """The pulse of the step loop, published after every turn and read by other threads without a lock.

    Attributes:
        engine_step: steps collected since start.
        loop_turns: turns of the loop since start, idle ones included: stands still only if the loop does.
        step_us, execute_us: duration of the last step collected, and of its part in the runner; see `StepTimes`.
        num_batched_tokens: tokens in the last step.
        num_prompt_tokens_total: prompt tokens computed since start (rows of one token are counted as decodes).
        num_late_compiles: kernels compiled since the engine was ready.
        num_integrity_checks, num_integrity_failures: looks through the scheduler's books, and contradictions found.
    """

    engine_step: int
    loop_turns: int
    stats: SchedulerStats
    step_us: int = 0
    execute_us: int = 0
    num_batched_tokens: int = 0
    num_prompt_tokens_total: int = 0
    num_late_compiles: int = 0
    num_integrity_checks: int = 0
    num_integrity_failures: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionReport:
    """What became of submissions, sent before the step that may run them.

    Attributes:
        accepted: requests in the queue.
        rejected: those that are not, each with the reason.
    """

    accepted: tuple[RequestId, ...]
    rejected: tuple[tuple[RequestId, RequestError], ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step yielded.

    Attributes:
        sampled_at_ns: CLOCK_MONOTONIC after the runner returned.
        seen_commands: last command the step had seen, for the sessions that sent one since the last report.
    """

    outputs: tuple[RequestOutput, ...]
    snapshot: LoopSnapshot
    sampled_at_ns: int
    seen_commands: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DrainReport:
    """The engine has begun to drain and stops after `grace_s` at the latest."""

    grace_s: float


Report = AdmissionReport | StepReport | DrainReport
