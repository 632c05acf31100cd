"""Judges whether one request met its latency targets, as its client sees the tokens."""

import time
from dataclasses import dataclass

from chairlift.service.service_classes import MAX_LATE_SHARE
from frontend.observability.outcome import Outcome
from frontend.observability.request_events import RequestEnd, RequestEvents, RequestProgress
from frontend.observability.target_metrics import TargetMetrics, TargetOutcome
from frontend.types import LatencyTargets


@dataclass(slots=True)
class _Answer:
    """Progress of one answer. Times are time.monotonic()."""

    first_at_s: float
    last_at_s: float
    num_tokens: int = 0


class TargetMeter(RequestEvents):
    """Counts one request: met, ttft_missed, itl_missed, degraded (late, in a class that degrades) or refused.

    A request without targets is met when it is complete. One that its client cancelled, or that failed, counts only if
    it was late before. The tokens of a chunk share the time since the chunk before, as in the inter-token metric.

    Args:
        metrics: where it is counted.
        targets: its targets.
    """

    def __init__(self, metrics: TargetMetrics, targets: LatencyTargets) -> None:
        self._metrics = metrics
        self._targets = targets
        self._answers: dict[int, _Answer] = {}
        self._num_tokens = 0
        self._num_late = 0

    def tokens_sent(self, request: RequestProgress, answer_index: int, num_tokens: int, at_s: float) -> None:
        """See RequestEvents."""
        inter_token_s = self._targets.inter_token_s
        self._num_tokens += num_tokens
        if inter_token_s is None:
            return
        answer = self._answers.get(answer_index)
        num_intervals = num_tokens
        if answer is None:
            first_at_s = at_s if self._answers else request.first_token_at_s
            answer = self._answers[answer_index] = _Answer(first_at_s, first_at_s)
            num_intervals -= 1
        if num_intervals:
            interval_s = (at_s - answer.last_at_s) / num_intervals
            if self._targets.pacing == "gap":
                self._num_late += num_intervals if interval_s > inter_token_s else 0
            else:
                first = answer.num_tokens + num_tokens - num_intervals  # index of the first of these
                lead_s = answer.last_at_s - answer.first_at_s
                self._num_late += sum(
                    lead_s + (i + 1) * interval_s > (first + i) * inter_token_s for i in range(num_intervals)
                )
        answer.num_tokens += num_tokens
        answer.last_at_s = at_s

    def ended(self, request: RequestProgress, end: RequestEnd) -> None:
        """See RequestEvents."""
        targets = self._targets
        if outcome := self._outcome(request, end):
            self._metrics.note_outcome(targets.service_class, outcome)
        if targets.tenant and request.started is not None:
            self._metrics.note_tokens(targets.tenant, request.started.num_prompt_tokens, request.num_sent_tokens)

    def _outcome(self, request: RequestProgress, end: RequestEnd) -> TargetOutcome | None:
        targets = self._targets
        if end.outcome is Outcome.SHED:
            return TargetOutcome.REFUSED
        if end.outcome is None:
            return None
        first_at_s = request.first_token_at_s or time.monotonic()
        if targets.ttft_s is not None and first_at_s - request.accepted_at_s > targets.ttft_s:
            return TargetOutcome.DEGRADED if targets.when_infeasible == "degrade" else TargetOutcome.TTFT_MISSED
        if self._num_late > MAX_LATE_SHARE * self._num_tokens:
            return TargetOutcome.ITL_MISSED
        return TargetOutcome.MET if end.is_complete else None
