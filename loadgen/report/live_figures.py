"""Figures of a run in progress, from the shared array of requests alone.

Cheap enough for some times a second: a few passes over one row per request, nothing is kept but what `LiveFigures`
says. Rates need two looks; `live` keeps them.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadgen.record import LiveView, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECENT_S = 10.0
_ENDED = tuple(int(status) for status in Status if status not in (Status.UNSENT, Status.IN_FLIGHT))


class Recent(NamedTuple):
    """A latency over the last ten seconds, in ms; NaN without a sample."""

    p50: float
    p99: float


class LiveFigures(NamedTuple):
    """Figures of a run at one time.

    Attributes:
        elapsed_s, duration_s: since the start, and until the last request is due.
        total, offered, done: requests of the workload, due by now, and over whatever became of them.
        failed: errors, timeouts, refused and dropped ones.
        in_flight, waiting: sent and not over; due and not sent.
        tokens: output tokens so far.
        ttft, tpot: of the last ten seconds: of first tokens that came in them, and of answers that ended in them.
        lag_ms: how late the requests sent in the last ten seconds were, 99th percentile; NaN without one.
    """

    elapsed_s: float
    duration_s: float
    total: int
    offered: int
    done: int
    failed: int
    in_flight: int
    waiting: int
    tokens: int
    ttft: Recent
    tpot: Recent
    lag_ms: float


def look(view: LiveView) -> LiveFigures:
    """Reads the array once. Columns are copied first: workers go on writing."""
    requests = view.requests
    scheduled, sent, first, last = (
        requests[name].copy() for name in ("scheduled_ns", "sent_ns", "first_ns", "last_ns")
    )
    status, tokens = requests["status"].copy(), requests["num_tokens"].copy()
    now_ns = round(view.elapsed_s * 1e9)
    since_ns = now_ns - round(RECENT_S * 1e9)
    over = np.isin(status, _ENDED)
    was_sent = sent >= 0
    due = was_sent | over | ((scheduled >= 0) & (scheduled <= now_ns))
    started = (first >= 0) & (first >= since_ns)
    answered = (status == Status.OK) & (tokens >= 2) & (requests["num_chunks"] >= 2) & (last >= since_ns)
    just_sent = was_sent & (sent >= since_ns)
    late_ms = (sent[just_sent] - scheduled[just_sent]) / 1e6
    return LiveFigures(
        elapsed_s=view.elapsed_s,
        duration_s=view.duration_s,
        total=len(requests),
        offered=int(due.sum()),
        done=int(over.sum()),
        failed=int(np.isin(status, (Status.ERROR, Status.REFUSED, Status.TIMEOUT, Status.DROPPED)).sum()),
        in_flight=int((was_sent & ~over).sum()),
        waiting=int((due & ~was_sent & ~over).sum()),
        tokens=int(tokens.sum()),
        ttft=_recent((first[started] - scheduled[started]) / 1e6),
        tpot=_recent((last[answered] - first[answered]) / (tokens[answered] - 1) / 1e6),
        lag_ms=float(np.quantile(late_ms, 0.99)) if len(late_ms) else math.nan,
    )


def _recent(values_ms: "NDArray[Any]") -> Recent:
    if len(values_ms) == 0:
        return Recent(math.nan, math.nan)
    p50, p99 = np.quantile(values_ms, (0.5, 0.99))
    return Recent(float(p50), float(p99))
