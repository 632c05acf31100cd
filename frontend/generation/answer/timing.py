"""Breaks down the latency of one answer into phases that add up to its total.

The frontend measures the total; the engine reports durations by its own clock. Transport time is in neither and falls
to the phase that takes the remainder. All parts are whole microseconds. Pure.
"""

from google.protobuf.duration import from_microseconds
from google.protobuf.duration_pb2 import Duration

from chairlift.v1 import generation_service_pb2 as pb
from frontend.types import AnswerTimes, EngineTime


def timing(
    times: AnswerTimes,
    engine: EngineTime | None,
    *,
    first_token_at_s: float | None,
    client_wait_s: float,
    now_s: float,
) -> pb.Timing:
    """Returns the latency breakdown of an answer that ends now.

    Args:
        times: measured before submission to the engine.
        engine: reported by the engine; None: it has reported nothing.
        first_token_at_s: time.monotonic() when its first token arrived; None: it has none.
        client_wait_s: time spent waiting for the client to read that the engine does not count.
        now_s: time.monotonic().
    """
    engine = engine or EngineTime(queued_s=0.0, prefill_s=0.0)
    total_us = left_us = _microseconds(now_s - times.accepted_at_s)

    def part(seconds: float) -> Duration:
        """Takes one phase; clocks and rounding may exceed the total, which then shortens the last phases."""
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
