"""What a profile says of a GPU's idle time: the time in which no kernel and no copy ran.

The gaps between the kernels of one step belong to the step; those between steps are the host's fault. Between N steps
lie N - 1 gaps, and these are taken to be the N - 1 largest: a gap inside a recorded graph lasts a microsecond.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """Something that ran on the device, in microseconds of one clock."""

    start_us: float
    end_us: float


class Idle(NamedTuple):
    """Shares of the time from the first kernel to the last.

    Attributes:
        span_us: that time.
        between_steps: of the gaps between steps.
        total: of all gaps.
    """

    span_us: float
    between_steps: float
    total: float


def idle_shares(intervals: Iterable[Interval], num_steps: int) -> Idle:
    """Adds up the gaps.

    Args:
        intervals: in any order; they may overlap.
        num_steps: how many steps they are of, at least 1.
    Raises: ValueError: there are none.
    """
    ordered = sorted(intervals)
    if not ordered:
        raise ValueError("nothing ran on the device")
    gaps: list[float] = []
    busy_until = ordered[0].end_us
    for interval in ordered[1:]:
        if interval.start_us > busy_until:
            gaps.append(interval.start_us - busy_until)
        busy_until = max(busy_until, interval.end_us)
    span = busy_until - ordered[0].start_us
    between = sum(sorted(gaps, reverse=True)[: num_steps - 1])
    return Idle(span, between / span, sum(gaps) / span)
