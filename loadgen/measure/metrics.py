"""All figures of a run, from its records alone, so that they can be computed again with other limits or percentiles.

Pure. Definitions of the single latencies are in `samples`, of the measured part of a run in `steady_state`. Latencies
are of completed requests; `Counts` says how many were not, and `Goodput` counts those as bad.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.errors import OptionError
from loadgen.measure.accounting import CacheUse, Counts, TokenAccount, account_cache, account_tokens, count_outcomes
from loadgen.measure.class_goodput import ClassGoodput, class_goodput
from loadgen.measure.goodput import Goodput, check_slo, goodput, judged
from loadgen.measure.quantiles import Distribution, distribution
from loadgen.measure.samples import Samples, samples_of
from loadgen.measure.steady_state import Span, steady_span, whole_run
from loadgen.measure.timeseries import mean_present, peak_present, waiting_until_s
from loadgen.record import ABSENT, RunData
from loadgen.trace.stats import ArrivalStatistics, arrival_statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """What to measure.

    Attributes:
        warmup_s: left out of the steady-state window.
        slo: limits in ms a good answer keeps, by ttft, tpot, itl, e2el.
        percentiles: of every latency, each above 0 and below 100; 50 and 99 are always there.

    Raises: OptionError: a value out of range (names it).
    """

    warmup_s: float = 0.0
    slo: Mapping[str, float] = field(default_factory=dict)
    percentiles: tuple[float, ...] = (50.0, 75.0, 90.0, 95.0, 99.0, 99.9)

    def __post_init__(self) -> None:
        """Checks every range."""
        if not 0 <= self.warmup_s < float("inf"):
            raise OptionError(f"--warmup {self.warmup_s:g}: must be at least 0 seconds")
        check_slo(self.slo)
        for percentile in self.percentiles:
            if not 0 < percentile < 100:
                raise OptionError(f"--metric-percentiles {percentile:g}: must be above 0 and below 100")

    def as_json(self) -> dict[str, Any]:
        """For `RunData.settings["measure"]`: `report DIR` starts from it."""
        return {"warmup_s": self.warmup_s, "slo": dict(self.slo), "percentiles": list(self.percentiles)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "MeasureOptions":
        """Reads what `as_json` wrote; what is missing gets its default."""
        usual = cls()
        return cls(
            warmup_s=saved.get("warmup_s", usual.warmup_s),
            slo=saved.get("slo", usual.slo),
            percentiles=tuple(saved.get("percentiles", usual.percentiles)),
        )


@dataclass(frozen=True, slots=True)
class Latencies:
    """Distributions in milliseconds, see `Samples` for what each is.

    `itl` counts a gap once for each of the tokens that end it, `chunk_gap` once. Both are pooled over requests; all
    others have one value per request.
    """

    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    chunk_gap: Distribution
    max_stall: Distribution
    ttst: Distribution
    normalized: Distribution
    service_ttft: Distribution
    service_e2e: Distribution
    e2e_status: Distribution
    client_wait: Distribution
    server_queued: Distribution
    server_prefill: Distribution
    elsewhere: Distribution


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests and tokens delivered within a span, per second of it.

    Attributes:
        requests_per_s: completed, their last token inside.
        output_tokens_per_s: tokens that arrived inside, also of requests that failed later.
        input_tokens_per_s: of prompts whose first token arrived inside.
        peak_output_tokens_per_s: most that arrived within a second, whenever it began; NaN if the span is shorter.
        mean_in_flight, peak_in_flight: requests between send and status.
        mean_waiting: requests that were due and not yet sent.
    """

    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    peak_output_tokens_per_s: float
    mean_in_flight: float
    peak_in_flight: int
    mean_waiting: float

    @property
    def total_tokens_per_s(self) -> float:
        """Input and output."""
        return self.input_tokens_per_s + self.output_tokens_per_s


@dataclass(frozen=True, slots=True)
class Part:
    """All figures of a part of a run. `classes`: by service class; empty if requests had none."""

    span: Span
    counts: Counts
    latencies: Latencies
    throughput: Throughput
    goodput: Goodput
    classes: tuple[ClassGoodput, ...] = ()

    @property
    def interactivity(self) -> float:
        """Tokens per second of one stream at the median: 1 / TPOT p50."""
        return 1000.0 / self.latencies.tpot.p50 if self.latencies.tpot.p50 > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class Metrics:
    """All figures of a run.

    Attributes:
        options: what was asked for.
        steady: of the steady-state window: the figures to quote.
        whole: of the whole run, ramp and drain included; its counts and goodput are over the whole workload.
        tokens, cache: of the whole run; cache is None where the server does not say.
        planned, played: the schedule, and the times of sending; None without any, as of a closed loop's schedule.
    """

    options: MeasureOptions
    steady: Part
    whole: Part
    tokens: TokenAccount
    cache: CacheUse | None
    planned: ArrivalStatistics | None
    played: ArrivalStatistics | None


def measure(run: RunData, options: MeasureOptions | None = None, samples: Samples | None = None) -> Metrics:
    """Measures a run.

    Args:
        run: what is known of it.
        options: None takes the defaults.
        samples: of this run, if they are there already.
    """
    options = options or MeasureOptions()
    samples = samples or samples_of(run)
    span = steady_span(samples, warmup_s=options.warmup_s, ended_s=run.ended_s, interrupted=run.interrupted)
    whole = _part(run, samples, whole_run(run.ended_s), options)
    return Metrics(
        options=options,
        steady=_part(run, samples, span, options) if span.steady else whole,
        whole=whole,
        tokens=account_tokens(run, samples),
        cache=account_cache(run, samples),
        planned=None if run.settings.get("closed_loop") else _arrivals(run.workload.arrival_s),
        played=_arrivals(np.sort(samples.sent_s[~np.isnan(samples.sent_s)])),
    )


def _part(run: RunData, samples: Samples, span: Span, options: MeasureOptions) -> Part:
    due = span.holds(samples.scheduled_s) if span.steady else np.ones(len(run.requests), dtype=np.bool_)
    return Part(
        span=span,
        counts=count_outcomes(run, due),
        latencies=summarise(samples, due & samples.completed, options.percentiles),
        throughput=_throughput(run, samples, span),
        goodput=goodput(samples, options.slo, due & judged(run, samples, options.slo), span),
        classes=class_goodput(run, samples, due, span, options.percentiles),
    )


def summarise(samples: Samples, chosen: "Flags", percentiles: Sequence[float]) -> Latencies:
    """Distributions over the chosen requests, [requests] bool."""
    pooled = chosen[samples.gaps.request]
    gaps, tokens = samples.gaps.ms[pooled], samples.gaps.tokens[pooled]
    single = {
        one.name: distribution(getattr(samples, one.name)[chosen], percentiles)
        for one in fields(Latencies)
        if one.name not in ("itl", "chunk_gap")
    }
    return Latencies(
        itl=distribution(gaps / tokens, percentiles, weights=tokens),
        chunk_gap=distribution(gaps, percentiles),
        **single,
    )


def _arrivals(at_s: "NDArray[np.float64]") -> ArrivalStatistics | None:
    return arrival_statistics(at_s) if len(at_s) else None


def _throughput(run: RunData, samples: Samples, span: Span) -> Throughput:
    if span.duration_s <= 0:
        nan = float("nan")
        return Throughput(nan, nan, nan, nan, nan, 0, nan)
    server_input = run.requests["server_input_tokens"]
    input_tokens = np.where(server_input == ABSENT, run.workload.input_tokens, server_input)
    edges = np.array([span.start_s, span.end_s])
    inside = span.holds(samples.arrivals.at_s)
    at_s, tokens = samples.arrivals.at_s[inside], samples.arrivals.tokens[inside]
    return Throughput(
        requests_per_s=float((samples.completed & span.holds(samples.last_s)).sum()) / span.duration_s,
        output_tokens_per_s=float(tokens.sum()) / span.duration_s,
        input_tokens_per_s=float(input_tokens[span.holds(samples.first_s)].sum()) / span.duration_s,
        peak_output_tokens_per_s=_busiest_second(at_s, tokens) if span.duration_s >= 1 else float("nan"),
        mean_in_flight=float(mean_present(samples.last_sent_s, samples.ended_s, edges)[0]),
        peak_in_flight=peak_present(samples.last_sent_s, samples.ended_s, span.start_s, span.end_s),
        mean_waiting=float(mean_present(samples.scheduled_s, waiting_until_s(run, samples), edges)[0]),
    )


def _busiest_second(at_s: "NDArray[np.float64]", tokens: "NDArray[np.float64]") -> float:
    """Most tokens in a second that begins with a message: of seconds of the clock, a short span may have none busy."""
    order = np.argsort(at_s, kind="stable")
    before = np.concatenate(([0.0], np.cumsum(tokens[order])))
    ends = np.searchsorted(at_s[order], at_s[order] + 1.0)
    return float((before[ends] - before[:-1]).max(initial=0.0))
