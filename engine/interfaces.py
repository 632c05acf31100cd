"""The interfaces of the step loop: the model runner it drives, the commands it takes and the reports it makes.

Commands and reports are plain data, by request id: no socket and no protobuf crosses this line.
"""

from dataclasses import dataclass
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from chairlift.service.end_reason import EndReason
from engine.core.cache_events import CacheEvent
from engine.core.outputs import ModelRunnerOutput, RequestOutput, SchedulerOutput, SchedulerStats
from engine.core.request import Request, RequestId
from engine.errors import RequestError


class ModelRunner(Protocol):
    """Runs plans on a model, up to `max_steps_in_flight` at a time.

    `engine.runner.model_runner.TorchModelRunner` is the real one; tests use `FakeModelRunner`.
    """

    def launch(self, plan: SchedulerOutput) -> None:
        """Starts one step. It may still run when this returns, and the next one may be launched meanwhile.

        Args:
            plan: differences since the last plan and the rows of this step. A plan without rows applies only the
                differences, and is collected like any other.
        Raises: EngineError: the whole step failed; the process cannot continue.
        """
        ...

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was launched and not yet collected.

        Returns: one sampled token per sampling row.
        Raises: EngineError: the whole step failed; the process cannot continue.
        """
        ...


def execute(runner: ModelRunner, plan: SchedulerOutput) -> ModelRunnerOutput:
    """Launches and collects one step, if no other is in flight (warm-up, benchmarks, tests)."""
    runner.launch(plan)
    return runner.collect()


@dataclass(frozen=True, slots=True)
class Submit:
    """New requests, already validated."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Requests to cancel. Unknown and finished ones are ignored."""

    request_ids: tuple[RequestId, ...]
    reason: EndReason


@dataclass(frozen=True, slots=True)
class GrantCredit:
    """Token credit: pairs of request and number of additional output tokens."""

    grants: tuple[tuple[RequestId, int], ...]


@dataclass(frozen=True, slots=True)
class Fence:
    """Asks for a `FencePassed` of this number, once earlier commands are applied and all steps launched before have
    ended.
    """

    number: int


Command = Submit | Cancel | GrantCredit | Fence


class Inbox:
    """Queue of commands to the step loop: any thread puts, the step loop drains.

    Writers keep the bound: a session stops reading its stream while `MAX_PENDING_COMMANDS` are queued, and HTTP/2 flow
    control then blocks the frontend. `SimpleQueue.put` is safe in a signal handler that interrupts `drain` on the same
    thread.
    """

    MAX_PENDING_COMMANDS = 1024

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command | None] = SimpleQueue()

    @property
    def is_full(self) -> bool:
        """Whether writers must wait."""
        return self._queue.qsize() >= self.MAX_PENDING_COMMANDS

    def put(self, command: Command) -> None:
        """Adds a command; never blocks."""
        self._queue.put(command)

    def wake(self) -> None:
        """Wakes a waiting `drain` without a command."""
        self._queue.put(None)

    def drain(self, timeout_s: float) -> list[Command]:
        """Takes all queued commands, in order.

        Args:
            timeout_s: how long to wait if the queue is empty; 0 does not wait.
        Returns: the commands; empty after the timeout or a `wake`.
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
    """Start of a step and ends of its phases (schedule, execute, update), in perf_counter nanoseconds.

    With two steps in flight, a step is scheduled and launched while the previous one runs. Its time then starts when
    the previous one has been collected: `started_ns` equals `scheduled_ns`, and its execution overlaps the update of
    the previous step. The times of consecutive steps therefore add up to the elapsed time, except that these updates
    count twice.
    """

    started_ns: int
    scheduled_ns: int
    executed_ns: int
    updated_ns: int

    @property
    def step_us(self) -> int:
        """Duration of the step, microseconds."""
        return (self.updated_ns - self.started_ns) // 1000

    @property
    def execute_us(self) -> int:
        """Time in the runner, microseconds: from launch, or from collection of the previous step if later, to its own
        collection.
        """
        return (self.executed_ns - self.scheduled_ns) // 1000


class EngineState(Enum):
    """States of an engine, in this order; FAILED can follow any."""

    LOADING = auto()
    SERVING = auto()
    DRAINING = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """State of the step loop, published after every iteration and read by other threads without a lock.

    Attributes:
        engine_step: steps with rows collected since start.
        loop_turns: iterations of the loop since start, including idle ones; constant only if the loop hangs.
        step_us, execute_us: duration of the last step, and of its time in the runner; see `StepTimes`.
        num_batched_tokens: tokens in the last step.
        num_prompt_tokens_total: prompt tokens computed since start (rows of one token count as decodes).
        num_late_compiles: kernels compiled since the engine was ready.
        num_integrity_checks, num_integrity_failures: KV cache consistency checks made, and failed.
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
    """Result of submissions, sent before the step that may run them.

    Attributes:
        accepted: requests that were queued.
        rejected: requests that were not, each with the error.
    """

    accepted: tuple[RequestId, ...]
    rejected: tuple[tuple[RequestId, RequestError], ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Outputs of a step.

    Attributes:
        sampled_at_ns: CLOCK_MONOTONIC after the runner returned.
    """

    outputs: tuple[RequestOutput, ...]
    snapshot: LoopSnapshot
    sampled_at_ns: int


@dataclass(frozen=True, slots=True)
class DrainReport:
    """The engine has started to drain and stops within `grace_s`."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class FencePassed:
    """See `Fence`."""

    number: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What entered and left the prefix cache, in order; not empty."""

    events: tuple[CacheEvent, ...]


Report = AdmissionReport | StepReport | DrainReport | FencePassed | CacheReport
