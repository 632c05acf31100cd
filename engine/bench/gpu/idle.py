"""Idle time of a GPU from a profile: the time without a kernel or copy; and the time of each kernel.

Gaps between the kernels of a step are part of the step; gaps between steps are caused by the host. N steps have N - 1
gaps between them, taken to be the N - 1 largest: a gap inside a recorded graph lasts a microsecond.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """A kernel or copy on the device, in microseconds of one clock."""

    start_us: float
    end_us: float
    name: str = ""


class Idle(NamedTuple):
    """Shares of the time from the first kernel to the last.

    Attributes:
        span_us: the time from the first kernel to the last.
        between_steps: share of the gaps between steps.
        total: share of all gaps.
    """

    span_us: float
    between_steps: float
    total: float


def idle_shares(intervals: Iterable[Interval], num_steps: int) -> Idle:
    """Sums the gaps.

    Args:
        intervals: in any order; they may overlap.
        num_steps: number of steps in them, at least 1.
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


def kernel_times(intervals: Iterable[Interval]) -> dict[str, float]:
    """Returns the microseconds of the kernels and copies of each name, the largest sum first."""
    sums: defaultdict[str, float] = defaultdict(float)
    for interval in intervals:
        sums[interval.name] += interval.end_us - interval.start_us
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
