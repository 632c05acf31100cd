"""One run of a sweep, as far as the sweep needs it."""

import math
from dataclasses import dataclass
from typing import Literal

from loadgen.checks.finding import Level
from loadgen.checks.selfcheck import Verdict
from loadgen.measure.metrics import Metrics
from loadgen.measure.quantiles import Distribution
from loadgen.record import RunData

Axis = Literal["rate", "concurrency"]
UNITS: dict[Axis, str] = {"rate": "requests/s", "concurrency": "requests at once"}


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """One run of a sweep. Latencies are in ms, of the measured window.

    Attributes:
        load: requests per second that were offered, or requests at once.
        level: its verdict.
        reasons: why it is not VALID, the worst first.
        folder: of its records and reports.
        offered, good: requests, and those of them that kept every limit.
        goodput_per_s: of the latter.
        ttft, tpot, e2e, normalized: latencies of the completed requests.
        requests_per_s, output_tokens_per_s: delivered.
        interactivity: tokens per second and user, at the median TPOT.
        interrupted: stopped by Ctrl-C.
    """

    load: float
    level: Level
    reasons: tuple[str, ...]
    folder: str
    offered: int
    good: int
    goodput_per_s: float
    ttft: Distribution
    tpot: Distribution
    e2e: Distribution
    normalized: Distribution
    requests_per_s: float
    output_tokens_per_s: float
    interactivity: float
    interrupted: bool = False

    @property
    def attainment(self) -> float:
        """Share of the offered that was good; NaN where nothing was offered."""
        return self.good / self.offered if self.offered else math.nan

    @property
    def counts(self) -> bool:
        """It may be used for an answer."""
        return self.level != "INVALID" and not self.interrupted and self.offered > 0


def load_level_of(load: float, run: RunData, metrics: Metrics, verdict: Verdict, folder: str) -> LoadLevel:
    """The load level that a run is."""
    part = metrics.steady
    return LoadLevel(
        load=load,
        level=verdict.level,
        reasons=tuple(finding.sentence for finding in verdict.reasons),
        folder=folder,
        offered=part.goodput.offered,
        good=part.goodput.good,
        goodput_per_s=part.goodput.requests_per_s,
        ttft=part.latencies.ttft,
        tpot=part.latencies.tpot,
        e2e=part.latencies.e2e,
        normalized=part.latencies.normalized,
        requests_per_s=part.throughput.requests_per_s,
        output_tokens_per_s=part.throughput.output_tokens_per_s,
        interactivity=part.interactivity,
        interrupted=run.interrupted,
    )
