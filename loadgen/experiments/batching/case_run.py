"""One run of a case on one system: the measurements of its client joined with the steps of its engine.

Pure. Times count from when a request was due, or, behind barriers, from the end of the last barrier's answer: the
engine could not take it earlier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.errors import ResultError
from loadgen.experiments.batching.slots import SlotUse, assign_slots, padded_tokens
from loadgen.record import RunData, Status
from loadgen.step_log import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Milliseconds, one value per request; as in the load generator's reports.

    Attributes:
        ttft: to the first token.
        normalized: to the last token, per token of the answer.
        tpot: per token after the first, of answers of two tokens and more.
    """

    ttft: "Floats"
    normalized: "Floats"
    tpot: "Floats"


@dataclass(frozen=True, slots=True)
class Steps:
    """The engine's steps.

    Attributes:
        rows: [steps] requests in the batch.
        tokens: [steps] tokens computed.
        ms: [steps] until the next step began, or this one ended.
    """

    rows: "Integers"
    tokens: "Integers"
    ms: "Floats"

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class CaseRun:
    """Result of a run.

    Attributes:
        seconds: from the start, see above, to the last token.
        output_tokens: of all answers.
        latencies: of all requests.
        steps: of the engine.
        slot_use: slot occupancy.
        cached_share: of the prompt tokens, those that the prefix cache had.
        client_cores: cores that frontend and load generator kept busy.
        num_misplaced: places of the queue with another answer's length than planned: requests overtook each other.
    """

    seconds: float
    output_tokens: int
    latencies: Latencies
    steps: Steps
    slot_use: SlotUse
    cached_share: float
    client_cores: float
    num_misplaced: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall clock."""
        return self.output_tokens / self.seconds

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its slot."""
        return sum(occupancy.usage is None for occupancy in self.slot_use.occupancies)

    @property
    def padding_ratio(self) -> float:
        """Tokens that this run's batches would have computed if they were padded, over those that were computed."""
        return sum(map(padded_tokens, self.slot_use.batches())) / int(self.steps.tokens.sum())


def require_whole_answers(run: RunData) -> None:
    """Raises ResultError unless every request got as many tokens as it asked for."""
    requests = run.requests
    if run.interrupted:
        raise ResultError("the run was interrupted")
    if failed := int((requests["status"] != Status.OK).sum()):
        errors = "; ".join(run.errors) or "no error was reported"
        raise ResultError(f"{failed} of {len(requests)} requests got no whole answer: {errors}")
    if short := int((requests["num_tokens"] != run.workload.output_tokens).sum()):
        raise ResultError(f"{short} of {len(requests)} answers have another length than was asked for")


def case_run_of(
    run: RunData, num_barriers: int, steps: Sequence[Step], num_slots: int, frontend_cpu_s: float = 0.0
) -> CaseRun:
    """Joins the client's measurements with the engine's steps.

    Args:
        run: barriers first, with whole answers.
        num_barriers: how many there are.
        steps: of the engine, without those of the barriers.
        num_slots: of the engine.
        frontend_cpu_s: CPU seconds that the frontend used for the run.
    Raises: ResultError: client and engine disagree about the answers.
    """
    planned = run.workload.output_tokens[num_barriers:]
    requests = run.requests[num_barriers:]
    slot_use = assign_slots(steps, num_slots)
    lengths = slot_use.lengths()
    if sorted(lengths) != sorted(planned.tolist()):
        raise ResultError(
            f"the engine's log has {len(lengths)} answers of {sum(lengths)} tokens, "
            f"{len(planned)} of {int(planned.sum())} were asked for: does another client use the engine?"
        )
    opened_ns = int(run.requests["last_ns"][:num_barriers].max(initial=0))
    start_ns = np.maximum(requests["scheduled_ns"], opened_ns)
    usages = [occupancy.usage for occupancy in slot_use.occupancies if occupancy.usage is not None]
    seconds = float(requests["last_ns"].max() - start_ns.min()) / 1e9
    client_cpu_s = frontend_cpu_s + sum(float(worker.cpu_share.sum()) for worker in run.workers)
    return CaseRun(
        seconds=seconds,
        output_tokens=int(planned.sum()),
        latencies=_latencies(requests, start_ns),
        steps=_steps(steps),
        slot_use=slot_use,
        cached_share=sum(usage.cached for usage in usages) / sum(usage.prompt for usage in usages),
        client_cores=client_cpu_s / seconds,
        num_misplaced=sum(found != wanted for found, wanted in zip(lengths, planned.tolist(), strict=True)),
    )


def _latencies(requests: "NDArray[Any]", start_ns: "Integers") -> Latencies:
    counts = requests["num_tokens"].astype(np.float64)
    after_first_ns = (requests["last_ns"] - requests["first_ns"])[counts > 1]
    return Latencies(
        ttft=(requests["first_ns"] - start_ns) / 1e6,
        normalized=(requests["last_ns"] - start_ns) / 1e6 / counts,
        tpot=after_first_ns / 1e6 / (counts[counts > 1] - 1),
    )


def _steps(steps: Sequence[Step]) -> Steps:
    """A step lasts until the next begins; before a pause, and at the end, as long as it was busy.

    Turns of the engine between two steps are a fraction of a millisecond; a longer gap is one without work.
    """
    started_ms = np.array([step.started_ms for step in steps])
    busy_ms = np.array([step.busy_ms for step in steps])
    period_ms = np.append(np.diff(started_ms), busy_ms[-1:])
    was_idle = np.array([step.running + step.waiting == 0 for step in steps])
    return Steps(
        rows=np.array([len(step.rows) for step in steps]),
        tokens=np.array([step.num_tokens for step in steps]),
        ms=np.where(was_idle, busy_ms, period_ms),
    )
