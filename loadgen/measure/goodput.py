"""Goodput: answers within all latency limits, out of all requests that were offered.

Pure. Only delaying tokens or dropping late requests could make these figures better than the service was, so everything
that was offered counts: what failed, timed out, was dropped or never sent is bad. What we cancelled on purpose is not
judged at all, nor what Ctrl-C cut off before it could break a limit.

The share is of the requests that were due in a span. The rate, as every rate, is of those that ended in it: so it never
exceeds the rate of answered requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.errors import OptionError
from loadgen.record import RunData, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.measure.samples import Samples
    from loadgen.measure.steady_state import Span

SLO_METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Number of requests within every limit.

    Attributes:
        limits_ms: by metric: ttft and e2el count from when a request was due; itl is its longest gap per token.
        offered: requests that count.
        good: of them, those that were answered within all limits.
        requests_per_s: good answers whose last token arrived in the span, per second of it.
        kept: by metric, the share of the offered that kept this limit.
    """

    limits_ms: Mapping[str, float]
    offered: int
    good: int
    requests_per_s: float
    kept: Mapping[str, float]

    @property
    def attainment(self) -> float:
        """Share of offered requests that were good; NaN where none were offered."""
        return self.good / self.offered if self.offered else float("nan")


def check_slo(slo: Mapping[str, float]) -> None:
    """Raises: OptionError: a metric that is not known, or a limit that is not above 0 (names them)."""
    for metric, limit_ms in slo.items():
        if metric not in SLO_METRICS:
            raise OptionError(f"--goodput {metric}: is not one of {', '.join(SLO_METRICS)}")
        if not limit_ms > 0:
            raise OptionError(f"--goodput {metric}:{limit_ms:g}: must be above 0 ms")


def keeps(samples: "Samples", metric: str, limit_ms: float) -> "NDArray[np.bool_]":
    """[requests] bool: answered, and within this limit.

    An answer of one message, or of one token, has no time between tokens and keeps every tpot and itl.
    """
    if metric == "ttft":
        return samples.completed & (samples.ttft <= limit_ms)
    if metric == "e2el":
        return samples.completed & (samples.e2e <= limit_ms)
    if metric == "tpot":
        return samples.completed & (np.isnan(samples.tpot) | (samples.tpot <= limit_ms))
    return samples.completed & ((samples.num_chunks < 2) | (samples.max_itl <= limit_ms))


def judged(run: RunData, samples: "Samples", slo: Mapping[str, float]) -> "NDArray[np.bool_]":
    """[requests] bool: those that can be called good or bad: not what we cancelled; of an interrupted run, not what was
    cut off or not yet due, unless it had waited past a limit by then.
    """
    status = run.requests["status"]
    chosen = status != Status.CANCELLED
    if not run.interrupted:
        return np.asarray(chosen, dtype=np.bool_)
    waited_ms = 1e3 * (run.ended_s - samples.scheduled_s)
    to_first_ms = np.where(np.isnan(samples.ttft), waited_ms, samples.ttft)
    late = (waited_ms > slo.get("e2el", np.inf)) | (to_first_ms > slo.get("ttft", np.inf))
    cut_off = np.isin(status, (Status.UNSENT, Status.IN_FLIGHT))
    return np.asarray(chosen & (late | ~cut_off), dtype=np.bool_)


def goodput(samples: "Samples", slo: Mapping[str, float], offered: "NDArray[np.bool_]", span: "Span") -> Goodput:
    """Judges the offered requests.

    Args:
        samples: of the run.
        slo: limits in ms by metric, see SLO_METRICS; without any, every answer is good.
        offered: [requests] bool: those that count.
        span: in which they were due.
    """
    kept = {metric: keeps(samples, metric, limit_ms) for metric, limit_ms in slo.items()}
    good = np.logical_and.reduce([samples.completed, *kept.values()])
    number = int(offered.sum())
    ended = int((good & span.holds(samples.last_s)).sum())
    return Goodput(
        limits_ms=dict(slo),
        offered=number,
        good=int((good & offered).sum()),
        requests_per_s=ended / span.duration_s if span.duration_s > 0 else float("nan"),
        kept={metric: float((flags & offered).sum() / number) if number else np.nan for metric, flags in kept.items()},
    )
