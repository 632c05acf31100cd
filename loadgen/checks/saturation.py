"""Detects saturation: if requests accumulate, latency depends on the length of the run, and no figure of it is valid.

Pure. Both the requests in the system and the time to first token must rise: each is cut into equal parts of the window,
a straight line is laid through the parts' means, and its slope must be significant (Student's t) and large.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.measure.timeseries import mean_present
from loadgen.record import Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.measure.samples import Samples
    from loadgen.measure.steady_state import Span
    from loadgen.record import RunData

_PARTS = 20
_MIN_PARTS = 10
_MIN_REQUESTS = 50
# One-sided 1 % of Student's t with 8 degrees of freedom, the fewest that are judged; more have a smaller one.
_SIGNIFICANT_T = 2.9
_LARGE_RISE = 0.25


class Trend(NamedTuple):
    """A straight line fitted to means.

    Attributes:
        rise: from the first part to the last, over the mean.
        t: slope over its standard error.
    """

    rise: float
    t: float

    @property
    def up(self) -> bool:
        """Returns whether it rises significantly, and enough to matter."""
        return self.t > _SIGNIFICANT_T and self.rise > _LARGE_RISE


class Saturation(NamedTuple):
    """Trends of load and latency over the window."""

    in_system: Trend
    ttft: Trend

    @property
    def unstable(self) -> bool:
        """Returns whether both rise."""
        return self.in_system.up and self.ttft.up


def saturation(run: "RunData", samples: "Samples", span: "Span") -> Saturation | None:
    """Returns the trends in a window; None where too few requests were answered."""
    chosen = span.holds(samples.scheduled_s) & samples.completed
    if chosen.sum() < _MIN_REQUESTS:
        return None
    edges = np.linspace(span.start_s, span.end_s, _PARTS + 1)
    parts = np.clip(np.digitize(samples.scheduled_s[chosen], edges) - 1, 0, _PARTS - 1)
    number = np.bincount(parts, minlength=_PARTS)
    used = number > 0
    if used.sum() < _MIN_PARTS:
        return None
    ttft = np.bincount(parts, weights=samples.ttft[chosen], minlength=_PARTS)[used] / number[used]
    left_s = np.where(run.requests["status"] == Status.DROPPED, samples.scheduled_s, samples.ended_s)
    in_system = mean_present(samples.scheduled_s, left_s, edges)
    middle = (edges[:-1] + edges[1:]) / 2
    return Saturation(trend(middle, in_system), trend(middle[used], ttft))


def trend(x: "NDArray[np.float64]", y: "NDArray[np.float64]") -> Trend:
    """Least squares through [parts] float64 of both. A line without scatter has an infinite t, a flat one 0."""
    mean = float(y.mean())
    spread = x - x.mean()
    slope = float((spread * y).sum() / (spread**2).sum())
    scatter = float(((y - mean - slope * spread) ** 2).sum())
    error = float(np.sqrt(scatter / (len(x) - 2) / (spread**2).sum()))
    rise = slope * float(x[-1] - x[0]) / mean if mean > 0 else 0.0
    return Trend(rise, slope / error if error > 0 else np.inf * np.sign(slope) if slope else 0.0)
