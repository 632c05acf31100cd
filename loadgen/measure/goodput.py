"""Answers that were good enough, out of all that were asked for.

Pure. Only delaying tokens or dropping late requests could make these figures better than the service was, so everything
that was offered counts: what failed, timed out, was dropped or never sent is bad. What we cancelled on purpose is not
judged at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.measure.samples import Samples

SLO_METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many requests kept every limit.

    Attributes:
        limits_ms: by metric: ttft and e2el count from when a request was due; itl is its longest gap per token.
        offered: requests that count.
        good: of them, those that were answered within all limits.
        requests_per_s: good ones per second of the span.
        kept: by metric, the share of the offered that kept this limit.
    """

    limits_ms: Mapping[str, float]
    offered: int
    good: int
    requests_per_s: float
    kept: Mapping[str, float]

    @property
    def attainment(self) -> float:
        """Share of the offered that was good; NaN where nothing was offered."""
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

    An answer of one token has no time per later token and keeps every tpot; one of one message keeps every itl.
    """
    if metric == "ttft":
        return samples.completed & (samples.ttft <= limit_ms)
    if metric == "e2el":
        return samples.completed & (samples.e2e <= limit_ms)
    if metric == "tpot":
        return samples.completed & ((samples.num_tokens < 2) | (samples.tpot <= limit_ms))
    return samples.completed & ((samples.num_chunks < 2) | (samples.max_itl <= limit_ms))


def goodput(
    samples: "Samples",
    slo: Mapping[str, float],
    offered: "NDArray[np.bool_]",
    duration_s: float,
) -> Goodput:
    """Judges the offered requests.

    Args:
        samples: of the run.
        slo: limits in ms by metric, see SLO_METRICS; without any, every answer is good.
        offered: [requests] bool: those that count.
        duration_s: of the span they belong to.
    """
    kept = {metric: keeps(samples, metric, limit_ms) & offered for metric, limit_ms in slo.items()}
    good = int(np.logical_and.reduce([samples.completed & offered, *kept.values()]).sum())
    number = int(offered.sum())
    return Goodput(
        limits_ms=dict(slo),
        offered=number,
        good=good,
        requests_per_s=good / duration_s if duration_s > 0 else float("nan"),
        kept={metric: float(flags.sum()) / number if number else float("nan") for metric, flags in kept.items()},
    )
