"""Dataclasses that several layers of the frontend exchange. Imports nothing of the frontend."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Self

from chairlift.service.service_classes import PacingName, WhenInfeasibleName


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Identity of one worker process among those that share the ports.

    Attributes:
        index: counts from 0; a replacement takes the index of the worker it replaces.
        metrics_folder: folder where all workers keep their metrics.
        since: start of the first worker, Unix seconds.
    """

    index: int
    metrics_folder: Path
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """Time that a request has spent in the engine so far, by state, as the engine measured it. The rest is decoding.

    Attributes:
        moved_s: failover: from the last step of the lost engine to the first step of the next one, measured by the
            frontend (`routing/clock.py`).
    """

    queued_s: float
    prefill_s: float
    parked_s: float = 0.0
    preempted_s: float = 0.0
    num_preemptions: int = 0
    moved_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccount(EngineTime):
    """EngineTime of a request that has ended, whether or not it succeeded."""

    num_output_tokens: int

    @classmethod
    def at_end(cls, time: EngineTime, num_output_tokens: int) -> Self:
        """Completes a request's EngineTime."""
        return cls(
            queued_s=time.queued_s,
            prefill_s=time.prefill_s,
            parked_s=time.parked_s,
            preempted_s=time.preempted_s,
            num_preemptions=time.num_preemptions,
            moved_s=time.moved_s,
            num_output_tokens=num_output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTimes:
    """Times of an answer that the frontend measured before submitting it to an engine.

    Attributes:
        accepted_at_s, submitted_at_s: time.monotonic() at admission and at submission to the engine.
        tokenized_s: duration of rendering and tokenizing the prompt.
    """

    accepted_at_s: float
    tokenized_s: float
    submitted_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """Checked targets of one request. Without `ttft_s` and `inter_token_s` it is best effort.

    Attributes:
        ttft_s: seconds from the acceptance of the request to its first token.
        inter_token_s: seconds between tokens.
        service_class: name of its class; empty: none.
        value: weight of the class.
        pacing, when_infeasible, headroom: of the class, see ServiceClass.
        tenant: who is charged; empty: unknown.
        retry_ticket: ticket of an earlier refusal; empty: none.
        is_own: whether the request sets a target itself; those of classes are the operator's.
    """

    ttft_s: float | None = None
    inter_token_s: float | None = None
    service_class: str = ""
    value: float = 1.0
    pacing: PacingName = "gap"
    when_infeasible: WhenInfeasibleName = "wait"
    headroom: float = 0.0
    tenant: str = ""
    retry_ticket: str = ""
    is_own: bool = False

    @property
    def may_be_refused(self) -> bool:
        """Whether the request is refused if its first token cannot be in time."""
        return self.ttft_s is not None and self.when_infeasible == "refuse"


class RetryResult(Enum):
    """What became of a refusal for latency targets, or of the ticket that it carried.

    Of refusals: BOOKED, BEYOND_HORIZON (no slot is left within the horizon). Of tickets that came back: INVALID
    (forged, used, early or expired), REFUSED (valid, but the engines cannot be in time after all), MET and MISSED (the
    target of the first token).
    """

    BOOKED = "booked"
    BEYOND_HORIZON = "beyond_horizon"
    INVALID = "invalid"
    REFUSED = "refused"
    MET = "met"
    MISSED = "missed"
