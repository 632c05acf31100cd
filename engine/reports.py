"""What the step loop tells the IO thread: frozen, complete when created, by request id and not by stream."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from engine.core.outputs import RequestOutput, SchedulerStats
from engine.core.request import RequestId
from engine.errors import RequestError


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
