"""Prometheus metrics of one request: counters of requests and billed tokens, histograms of its latencies."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from chairlift.v1 import generation_service_pb2 as pb
from frontend.observability.request_events import RequestEnd, RequestEvents, RequestProgress
from frontend.observability.request_metrics import RequestMetrics, RequestSeries
from frontend.types import EngineAccount


@dataclass(slots=True)
class _Answer:
    """Progress of one answer. Times are time.monotonic()."""

    first_token_at_s: float
    last_token_at_s: float
    num_tokens: int = 0


class RequestMeter(RequestEvents):
    """Counts one request.

    Invariant: a request that ended has been counted exactly once, and the token counters have grown by the number of
    tokens sent to its client.

    Args:
        metrics: where it is counted.
    """

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._accepted_series: RequestSeries | None = None
        self._answers: dict[int, _Answer] = {}
        self._prefill_s: float | None = None
        self._decode_s: float | None = None

    def received(self, request: RequestProgress) -> None:
        self._metrics.received.inc()

    def accepted(self, request: RequestProgress, prompt_text: Callable[[], str]) -> None:
        self._accepted_series = self._metrics.series(request.model_name, request.engine)
        self._series.params_n.observe(request.num_answers)

    def submitted(self, request: RequestProgress, max_tokens: int) -> None:
        self._accepted_series = self._metrics.series(request.model_name, request.engine)
        self._series.params_max_tokens.observe(max_tokens)

    def started(self, request: RequestProgress, started: pb.Started) -> None:
        if request.streamed:
            self._series.prompt_tokens.inc(started.num_prompt_tokens)
            self._series.prompt_tokens_cached.inc(started.num_cached_tokens)

    def tokens_sent(self, request: RequestProgress, answer_index: int, num_tokens: int, at_s: float) -> None:
        series = self._series
        answer = self._answers.get(answer_index)
        num_intervals = num_tokens
        if answer is None:
            # The first answer's first token came with Started; that of any other comes now.
            first_at_s = at_s if self._answers else request.first_token_at_s
            if not self._answers:
                series.first_token_s.observe(first_at_s - request.accepted_at_s)
            answer = self._answers[answer_index] = _Answer(first_at_s, first_at_s)
            num_intervals -= 1
        if num_intervals:
            interval_s = (at_s - answer.last_token_at_s) / num_intervals
            for _ in range(num_intervals):  # the tokens of a chunk share the time since the previous chunk
                series.token_interval_s.observe(interval_s)
        answer.num_tokens += num_tokens
        answer.last_token_at_s = at_s
        if request.streamed:
            series.generation_tokens.inc(num_tokens)

    def answer_finished(self, request: RequestProgress, finished: pb.Finished) -> None:
        answer = self._answers.get(finished.answer_index)
        if answer is not None and answer.num_tokens > 1:
            time_s = answer.last_token_at_s - answer.first_token_at_s
            self._series.time_per_token_s.observe(time_s / (answer.num_tokens - 1))

    def engine_account(self, request: RequestProgress, account: EngineAccount) -> None:
        series = self._series
        series.queued_s.observe(request.submitted_at_s - request.accepted_at_s + account.queued_s)
        series.num_preemptions.observe(account.num_preemptions)
        if account.moved_s:
            series.moved_s.observe(account.moved_s)
        if account.num_output_tokens:
            self._prefill_s = account.prefill_s
            series.prefill_s.observe(account.prefill_s)
            self._observe_inference()

    def ended(self, request: RequestProgress, end: RequestEnd) -> None:
        if end.outcome is None:
            self._metrics.refused.labels(end.error_code).inc()
            return
        if request.started is not None and (end.is_complete or request.streamed):
            self._bill(request, request.started)
        if end.is_complete:
            self._observe_times(request)
        self._series.ends[end.outcome].inc()

    @property
    def _series(self) -> RequestSeries:
        assert self._accepted_series is not None, "the request has not been accepted"
        return self._accepted_series

    def _bill(self, request: RequestProgress, started: pb.Started) -> None:
        series = self._series
        if not request.streamed:
            series.prompt_tokens.inc(started.num_prompt_tokens)
            series.prompt_tokens_cached.inc(started.num_cached_tokens)
            series.generation_tokens.inc(request.num_sent_tokens)
        series.num_prompt_tokens.observe(started.num_prompt_tokens)
        series.num_computed_tokens.observe(started.num_prompt_tokens - started.num_cached_tokens)
        series.num_generation_tokens.observe(request.num_sent_tokens)

    def _observe_times(self, request: RequestProgress) -> None:
        longest = max((answer.num_tokens for answer in self._answers.values()), default=0)
        self._series.max_generation_tokens.observe(longest)
        self._series.total_s.observe(time.monotonic() - request.accepted_at_s)
        if self._answers:
            self._decode_s = max(request.last_token_at_s - request.first_token_at_s, 0.0)
            self._series.decode_s.observe(self._decode_s)
            self._observe_inference()

    def _observe_inference(self) -> None:
        if self._prefill_s is not None and self._decode_s is not None:
            self._series.inference_s.observe(self._prefill_s + self._decode_s)
