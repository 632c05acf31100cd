"""The part of a run that is measured: neither the warm-up nor the drain after the last arrival.

Pure. Latencies are of the requests that were due in the window, tokens are those delivered in it.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.measure.samples import Samples

# Where fewer of the window's requests were answered in it, arrivals were over before the server had filled up: a burst.
_MIN_ANSWERED = 0.1


class Span(NamedTuple):
    """A part of a run, both ends included.

    Attributes:
        start_s, end_s: seconds from the start of the run.
        steady: between warm-up and last arrival; otherwise it is the whole run.
    """

    start_s: float
    end_s: float
    steady: bool

    @property
    def duration_s(self) -> float:
        """Returns its length; 0 only for a run without requests."""
        return self.end_s - self.start_s

    def holds(self, at_s: "NDArray[np.float64]") -> "NDArray[np.bool_]":
        """[times] bool: those within it; NaN never is."""
        return (at_s >= self.start_s) & (at_s <= self.end_s)


def whole_run(ended_s: float) -> Span:
    """Returns the span from the start of the run to its last status."""
    return Span(0.0, ended_s, steady=False)


def steady_span(samples: "Samples", *, warmup_s: float, ended_s: float, interrupted: bool) -> Span:
    """From the end of the warm-up to the last arrival; of an interrupted run, to the last one that was sent.

    The whole run, where there is no such state: all requests come at once, the warm-up is longer than the schedule, or
    less than a tenth of the requests due in that time were answered in it.
    """
    known = ~np.isnan(samples.sent_s if interrupted else samples.scheduled_s)
    span = Span(warmup_s, float(samples.scheduled_s[known].max(initial=0.0)), steady=True)
    if span.duration_s <= 0:
        return whole_run(ended_s)
    chosen = span.holds(samples.scheduled_s)
    answered = chosen & samples.completed & span.holds(samples.last_s)
    if answered.sum() < _MIN_ANSWERED * chosen.sum() or not answered.any():
        return whole_run(ended_s)
    return span
