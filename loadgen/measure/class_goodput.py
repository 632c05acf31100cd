"""Goodput by service class: which requests met the targets that they asked for, and what became of the others.

Pure. A request meets its targets if its answer is complete, its first token came within the class's `ttft_s`, and at
most MAX_LATE_SHARE of its tokens were late, as the frontend and the twin judge it. Under `gap` a token is late after a
gap per token above `inter_token_s`; under `paced` it is late after `first + k * inter_token_s`, k tokens after the
first. One percent forgives nothing below 100 tokens.

Time counts from when a request was due, also for one that was refused and came back. What the server promised it then,
a first token in time from the moment it named, is counted apart.

Counts are of the requests that were due in a span. Rates are of those that ended in it, as every rate is, so that they
never exceed what the server delivered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chairlift.service.service_classes import MAX_LATE_SHARE, ServiceClass
from loadgen.measure.goodput import judged
from loadgen.measure.quantiles import Distribution, distribution
from loadgen.record import RunData, Status
from loadgen.service_mix import recorded_classes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.measure.samples import Samples
    from loadgen.measure.steady_state import Span

    Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassGoodput:
    """One service class. `offered` is the sum of the next five counts.

    Attributes:
        name: of the class.
        offered: requests that were due in the span and can be judged, see `goodput.judged`.
        met: met their targets, counted from when they were due.
        met_at_retry: did not, but came back after a refusal and met them counted from the time they were told.
        late: were answered late, at their first token or later ones.
        refused: for their targets, and did not come back or were refused again.
        failed: errors, timeouts, dropped, unfinished.
        came_back: were refused and came back when told, once or more.
        retries_met: of these, met their targets counted from the time they were told: `met_at_retry`, and those that
            even did from when they were due.
        good_requests_per_s: that met their targets and whose last token arrived in the span, per second of it.
        good_tokens_per_s: tokens of their prompts and answers.
        ttft, itl: milliseconds, of completed requests: from when they were due, and per token, one value per token.
    """

    name: str
    offered: int
    met: int
    met_at_retry: int
    late: int
    refused: int
    failed: int
    came_back: int
    retries_met: int
    good_requests_per_s: float
    good_tokens_per_s: float
    ttft: Distribution
    itl: Distribution

    @property
    def met_share(self) -> float:
        """Requests that met their targets from when they were due, of those offered; NaN without any."""
        return self.met / self.offered if self.offered else float("nan")

    @property
    def retries_met_share(self) -> float:
        """Requests that met their targets at their retry, of those that came back; NaN without any."""
        return self.retries_met / self.came_back if self.came_back else float("nan")


def class_goodput(
    run: RunData, samples: "Samples", due: "Flags", span: "Span", percentiles: Sequence[float]
) -> tuple[ClassGoodput, ...]:
    """Judges the requests of a run by class; empty if they had no classes.

    Args:
        run: with the classes in its settings.
        samples: of the run.
        due: [requests] bool: due in the span.
        span: in which they were due; rates are of the answers that ended in it.
        percentiles: of the latencies.
    """
    classes = recorded_classes(run.settings)
    if not classes:
        return ()
    num_late = late_tokens(run, samples, classes)
    return tuple(
        _of_class(run, samples, one, run.requests["service_class"] == index, due, num_late, span, percentiles)
        for index, one in enumerate(classes)
    )


def _of_class(
    run: RunData,
    samples: "Samples",
    one: ServiceClass,
    own: "Flags",
    due: "Flags",
    num_late: "NDArray[np.float64]",
    span: "Span",
    percentiles: Sequence[float],
) -> ClassGoodput:
    limit_ms = np.inf if one.ttft_s is None else 1e3 * one.ttft_s
    offered = own & due & judged(run, samples, {} if one.ttft_s is None else {"ttft": limit_ms})
    answered = offered & samples.completed
    came_back = offered & ~np.isnan(samples.last_sent_s) & (samples.last_sent_s != samples.sent_s)
    in_pace = num_late <= MAX_LATE_SHARE * samples.num_tokens
    good = own & samples.completed & in_pace & (samples.ttft <= limit_ms)
    met = offered & good
    from_retry_ms = 1e3 * (samples.first_s - samples.retry_due_s)
    retries_met = answered & in_pace & came_back & (from_retry_ms <= limit_ms)
    at_retry = retries_met & ~met
    refused = offered & (run.requests["status"] == Status.REFUSED)
    ended = good & span.holds(samples.last_s)
    tokens = run.workload.input_tokens + samples.num_tokens
    pooled = answered[samples.gaps.request]
    gap_ms, gap_tokens = samples.gaps.per_token_ms[pooled], samples.gaps.tokens[pooled]
    seconds = span.duration_s if span.duration_s > 0 else float("nan")
    return ClassGoodput(
        name=one.name,
        offered=int(offered.sum()),
        met=int(met.sum()),
        met_at_retry=int(at_retry.sum()),
        late=int((answered & ~met & ~at_retry).sum()),
        refused=int(refused.sum()),
        failed=int((offered & ~answered & ~refused).sum()),
        came_back=int(came_back.sum()),
        retries_met=int(retries_met.sum()),
        good_requests_per_s=float(ended.sum()) / seconds,
        good_tokens_per_s=float(tokens[ended].sum()) / seconds,
        ttft=distribution(samples.ttft[answered], percentiles),
        itl=distribution(gap_ms, percentiles, weights=gap_tokens),
    )


def late_tokens(run: RunData, samples: "Samples", classes: Sequence[ServiceClass]) -> "NDArray[np.float64]":
    """[requests] float64: tokens after the first that came later than the class of their request allows.

    All tokens of a message came when it came. A request of which the time of a message was lost has none.
    """
    limits_ms = np.array([np.inf if one.inter_token_s is None else 1e3 * one.inter_token_s for one in classes])
    is_paced = np.array([one.pacing == "paced" for one in classes])
    own = run.requests["service_class"]
    gaps = samples.gaps
    limit_ms = limits_ms[own[gaps.request]]
    wide = np.where(gaps.per_token_ms > limit_ms, gaps.tokens, 0.0)
    by_gap = np.bincount(gaps.request, weights=wide, minlength=len(own))
    # Sums within a request: gaps are in order of request and time.
    first = np.searchsorted(gaps.request, gaps.request)
    since_first_ms, tokens = (
        np.cumsum(column) - (np.cumsum(column) - column)[first] for column in (gaps.ms, gaps.tokens)
    )
    in_first = samples.num_tokens - np.bincount(gaps.request, weights=gaps.tokens, minlength=len(own))
    before = in_first[gaps.request] - 1 + tokens - gaps.tokens  # after the first token, before this message
    # Of this message the tokens up to this one are late: the k-th after the first is if k * limit < time.
    overdue = np.clip(np.ceil(since_first_ms / limit_ms) - 1 - before, 0.0, gaps.tokens)
    by_pace = np.bincount(gaps.request, weights=overdue, minlength=len(own))
    late: NDArray[np.float64] = np.where(is_paced[own], by_pace, by_gap)
    return late
