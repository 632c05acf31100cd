"""Time series of a run: requests due and in flight, tokens delivered, times to first tokens.

Pure: arrays in, arrays out.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.measure.samples import Samples, samples_of
from loadgen.record import RunData, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_FAILED = (Status.ERROR, Status.REFUSED, Status.TIMEOUT, Status.DROPPED)


@dataclass(frozen=True, slots=True)
class Timeseries:
    """Columns, [bins] float64 each.

    Attributes:
        bin_s: length of a bin; the last one may reach past the end of the run.
        start_s: of each bin, seconds from the start of the run.
        offered, completed, failed: requests per second: due; answered; errors, timeouts, refused and dropped ones.
        in_flight: requests between send and status, mean of the bin.
        waiting: requests due and not yet sent, mean of the bin.
        output_tokens: delivered, per second.
        ttft_p50_ms, ttft_p99_ms: of the requests due in the bin, from when they were due; NaN without one.
    """

    bin_s: float
    start_s: "Floats"
    offered: "Floats"
    completed: "Floats"
    failed: "Floats"
    in_flight: "Floats"
    waiting: "Floats"
    output_tokens: "Floats"
    ttft_p50_ms: "Floats"
    ttft_p99_ms: "Floats"


def timeseries(run: RunData, samples: Samples | None = None, *, bin_s: float = 1.0) -> Timeseries:
    """Cuts a run into bins."""
    samples = samples or samples_of(run)
    edges = np.arange(max(1, int(np.ceil(run.ended_s / bin_s))) + 1, dtype=np.float64) * np.float64(bin_s)
    inside = (edges[0], edges[-1])

    def per_second(at_s: "Floats", weights: "Floats | None" = None) -> "Floats":
        return np.histogram(at_s, len(edges) - 1, range=inside, weights=weights)[0] / bin_s

    status = run.requests["status"]
    failed = np.isin(status, [int(one) for one in _FAILED])
    over_s = np.where(np.isnan(samples.ended_s), samples.scheduled_s, samples.ended_s)
    answered = samples.completed & ~np.isnan(samples.ttft)
    ttft = _by_bin(np.digitize(samples.scheduled_s[answered], edges) - 1, samples.ttft[answered], len(edges) - 1)
    return Timeseries(
        bin_s=bin_s,
        start_s=edges[:-1],
        offered=per_second(samples.scheduled_s[~np.isnan(samples.scheduled_s)]),
        completed=per_second(samples.last_s[answered]),
        failed=per_second(over_s[failed]),
        in_flight=mean_present(samples.last_sent_s, samples.ended_s, edges),
        waiting=mean_present(samples.scheduled_s, waiting_until_s(run, samples), edges),
        output_tokens=per_second(samples.arrivals.at_s, samples.arrivals.tokens),
        ttft_p50_ms=ttft[0],
        ttft_p99_ms=ttft[1],
    )


def mean_present(from_s: "Floats", until_s: "Floats", edges: "Floats") -> "Floats":
    """Returns the mean number present between consecutive edges.

    Args:
        from_s, until_s: [requests] float64: when each comes and goes. NaN in `from_s`: never; in `until_s`: it stays.
        edges: [bins + 1] float64, ascending.
    Returns: [bins] float64, exact: time spent in the bin by all, over its length.
    """
    present = ~np.isnan(from_s)
    come = np.sort(from_s[present])
    gone = np.sort(np.where(np.isnan(until_s[present]), np.inf, np.maximum(until_s[present], from_s[present])))
    spent = _spent(come, edges) - _spent(gone[np.isfinite(gone)], edges)
    return np.maximum(np.diff(spent), 0.0) / np.diff(edges)


def peak_present(from_s: "Floats", until_s: "Floats", low_s: float, high_s: float) -> int:
    """Returns the largest number present between two times; NaN as in `mean_present`. Ends count before begins."""
    present = ~np.isnan(from_s)
    come = from_s[present]
    gone = np.where(np.isnan(until_s[present]), np.inf, np.maximum(until_s[present], come))
    at_s = np.clip(np.concatenate((gone, come)), low_s, None)
    change = np.concatenate((-np.ones(len(gone), dtype=np.int64), np.ones(len(come), dtype=np.int64)))
    order = np.argsort(at_s, kind="stable")
    there = np.cumsum(change[order])
    return int(there[at_s[order] <= high_s].max(initial=0))


def waiting_until_s(run: RunData, samples: Samples) -> "Floats":
    """[requests] float64: when each stopped waiting to be sent: at once if it was dropped, never (NaN) if unsent."""
    return np.where(run.requests["status"] == Status.DROPPED, samples.scheduled_s, samples.sent_s)


def _spent(ordered: "Floats", at_s: "Floats") -> "Floats":
    """Returns the sum of max(0, at - x) over all x."""
    before = np.searchsorted(ordered, at_s, side="right")
    return before * at_s - np.concatenate(([0.0], np.cumsum(ordered)))[before]


def _by_bin(bins: "NDArray[np.int64]", values: "Floats", count: int) -> tuple["Floats", "Floats"]:
    """Returns median and 99th percentile of each bin's values; NaN of an empty bin."""
    found = np.full((2, count), np.nan)
    order = np.argsort(bins, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(bins[order])) + 1):
        if len(part) and 0 <= bins[part[0]] < count:
            found[:, bins[part[0]]] = np.quantile(values[part], (0.5, 0.99))
    return found[0], found[1]
