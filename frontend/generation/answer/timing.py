"""The time account of one answer: what frontend and engine have measured, as parts that add up to the whole.

The frontend's clock says how long the whole was; what the engine says are durations, by its own clock. The way between
the two is in neither and falls to the one part that takes the rest. All parts are whole microseconds. Pure.
"""

from dataclasses import dataclass
from typing import Self

from google.protobuf.duration import from_microseconds
from google.protobuf.duration_pb2 import Duration

from chairlift.v1 import generation_service_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """Where the engine says the time of a request went so far; what stands in none of these was decoding.

    Attributes:
        moved_s: from the last step of a lost engine to the first one of the next; `clock.py` measures that.
    """

    queued_s: float
    prefill_s: float
    parked_s: float = 0.0
    preempted_s: float = 0.0
    num_preemptions: int = 0
    moved_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccount(EngineTime):
    """The same of a request that has ended, well or not."""

    num_output_tokens: int

    @classmethod
    def at_end(cls, time: EngineTime, num_output_tokens: int) -> Self:
        """What there is to say at the end."""
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
    """What the frontend measured of an answer.

    Attributes:
        accepted_at_s, submitted_at_s: time.monotonic() when the request got its place and when the answer was submitted
            to the engine.
        tokenized_s: how long rendering and tokenizing took.
    """

    accepted_at_s: float
    tokenized_s: float
    submitted_at_s: float


def timing(
    times: AnswerTimes,
    engine: EngineTime | None,
    *,
    first_token_at_s: float | None,
    client_wait_s: float,
    now_s: float,
) -> pb.Timing:
    """The account of an answer that ends now.

    Args:
        times: before the engine had it.
        engine: in the engine; None: it has said nothing.
        first_token_at_s: time.monotonic() when its first token arrived; None: it has none.
        client_wait_s: time spent waiting for the client to read that the engine does not know of.
        now_s: time.monotonic().
    """
    engine = engine or EngineTime(queued_s=0.0, prefill_s=0.0)
    total_us = left_us = _microseconds(now_s - times.accepted_at_s)

    def part(seconds: float) -> Duration:
        """Clocks and rounding may make the parts longer than the whole; then the last ones give way."""
        nonlocal left_us
        part_us = min(_microseconds(seconds), left_us)
        left_us -= part_us
        return from_microseconds(part_us)

    tokenized = part(times.tokenized_s)
    prefill = part(engine.prefill_s)
    preempted = part(engine.preempted_s)
    parked = part(engine.parked_s + client_wait_s)
    moved = part(engine.moved_s)
    if first_token_at_s is None:
        queued, left_us, first_token = from_microseconds(left_us), 0, None
    else:
        queued = part(times.submitted_at_s - times.accepted_at_s - times.tokenized_s + engine.queued_s)
        first_token = from_microseconds(_microseconds(first_token_at_s - times.accepted_at_s))
    return pb.Timing(
        queued=queued,
        prefill=prefill,
        first_token=first_token,
        total=from_microseconds(total_us),
        num_preemptions=engine.num_preemptions,
        tokenized=tokenized,
        decode=from_microseconds(left_us),
        parked=parked,
        preempted=preempted,
        moved=moved,
    )


def _microseconds(seconds: float) -> int:
    return max(int(seconds * 1e6), 0)
