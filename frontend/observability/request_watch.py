"""One request followed from its arrival to its end, so that it is counted once and billed for what was sent.

Wrapped around all that `generation.py` does for a request; whatever leaves the block is how the request ended. Tokens
are counted at the last place before the transport: whoever comes for the next message has sent the one before.
"""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.grpc.status import error_reason
from frontend.errors import RequestError
from frontend.generation.answer.timing import EngineAccount
from frontend.observability.outcome import COMPLETE_OUTCOMES, Outcome, failed_outcome, is_refusal
from frontend.observability.request_log import RequestLine
from frontend.observability.request_metrics import RequestMetrics, RequestSeries
from frontend.observability.request_trace import RequestTrace
from frontend.request.request import GenerationRequest


@dataclass(slots=True)
class _Answer:
    """One answer so far. Times are time.monotonic()."""

    first_token_at_s: float
    last_token_at_s: float
    num_tokens: int = 0


class RequestWatch:
    """A context manager around one request.

    Invariant: when the block is left, the request has been counted exactly once, and the counters of tokens have grown
    by what its client was sent.

    Args:
        metrics: where it is counted.
        deadline_passed: tells whether the call's deadline has passed.
        streamed: whether tokens are sent as they come. If not, nothing is sent, and billed, before all are there.
        trace: is told what a trace needs; None: nobody traces this.
        line: of the log; None: it gets none.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        deadline_passed: Callable[[], bool],
        *,
        streamed: bool,
        trace: RequestTrace | None = None,
        line: RequestLine | None = None,
    ) -> None:
        self._metrics = metrics
        self._traffic = metrics.traffic
        self._trace = trace
        self._line = line
        self._deadline_passed = deadline_passed
        self._streamed = streamed
        self._series: RequestSeries | None = None
        self._model_name = self._engine = ""
        self._num_answers = 1
        self._accepted_at_s = 0.0
        self._submitted_at_s = 0.0
        self._first_token_at_s = 0.0
        self._last_token_at_s = 0.0
        self._answers: dict[int, _Answer] = {}
        self._num_complete = 0
        self._outcome: Outcome | None = None
        self._started: pb.Started | None = None  # once it has been sent
        self._num_sent_tokens = 0
        self._prefill_s: float | None = None
        self._decode_s: float | None = None

    def __enter__(self) -> Self:
        self._metrics.received.inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        series = self._series
        if series is None or is_refusal(error):
            self._metrics.refuse(error)
            if series is None:
                self._traffic.num_rejected += 1
            else:
                self._traffic.end(has_started=self._started is not None, is_rejected=True)
            self._tell_end(error_reason(error), error_reason(error))
            return
        outcome = self._outcome if error is None and self._num_complete == self._num_answers else None
        if outcome is not None:
            self._bill(series)
            self._observe_times(series)
        else:
            outcome = failed_outcome(error, deadline_passed=self._deadline_passed())
            if self._streamed:
                self._bill(series)
        series.ends[outcome].inc()
        self._traffic.end(has_started=self._started is not None, is_rejected=outcome is Outcome.SHED)
        error_code = _error_code(error, outcome)
        self._tell_end(error_code, error_code or outcome.value)

    def accept(self, request: GenerationRequest, model_name: str, engine: str, *, now_s: float) -> None:
        """It asks for something that can be served here, as things stand by this engine."""
        if self._line is not None:
            self._line.accept(request, model_name)
        self._series = series = self._metrics.series(model_name, engine)
        self._model_name, self._engine = model_name, engine
        self._accepted_at_s = now_s
        self._num_answers = request.num_answers
        series.params_n.observe(request.num_answers)
        self._traffic.num_waiting += 1

    def submit(self, *, max_tokens: int, engine: str | None, now_s: float) -> None:
        """It goes to an engine, under whose name it counts from now on, wherever it may go later; None: it waits for
        one.
        """
        if engine is not None and engine != self._engine:
            self._series = self._metrics.series(self._model_name, engine)
        self._submitted_at_s = now_s
        self._accepted_series.params_max_tokens.observe(max_tokens)

    async def follow(
        self, messages: AsyncIterator[pb.StreamGenerateResponse]
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        """Passes the messages of its answers on, and notes what becomes of them."""
        series = self._accepted_series
        async for message in messages:
            now_s = time.monotonic()
            match message.WhichOneof("event"):
                case "chunk":
                    yield message
                    chunk = message.chunk
                    if chunk.num_tokens:  # else it is text that had lagged behind
                        self._note_sent(series, chunk.answer_index, chunk.num_tokens, now_s)
                case "started":
                    self._first_token_at_s = now_s  # if it has one
                    yield message
                    self._note_started(series, message.started)
                case "finished":
                    self._note_complete(series, message.finished)
                    yield message

    def account(self, account: EngineAccount) -> None:
        """The engine's account of it, which may come after its end."""
        series = self._accepted_series
        series.queued_s.observe(self._submitted_at_s - self._accepted_at_s + account.queued_s)
        series.num_preemptions.observe(account.num_preemptions)
        if account.moved_s:
            series.moved_s.observe(account.moved_s)
        if self._trace is not None:
            self._trace.account(account, accepted_at_s=self._accepted_at_s, submitted_at_s=self._submitted_at_s)
        if account.num_output_tokens:
            self._prefill_s = account.prefill_s
            series.prefill_s.observe(account.prefill_s)
            self._observe_inference(series)

    @property
    def _accepted_series(self) -> RequestSeries:
        assert self._series is not None, "the request has not been accepted"
        return self._series

    def _note_started(self, series: RequestSeries, started: pb.Started) -> None:
        self._started = started
        self._traffic.start(started.num_prompt_tokens, self._first_token_at_s - self._accepted_at_s)
        if self._trace is not None:
            self._trace.started(started)
        if self._streamed:
            series.prompt_tokens.inc(started.num_prompt_tokens)
            series.prompt_tokens_cached.inc(started.num_cached_tokens)

    def _note_sent(self, series: RequestSeries, index: int, num_tokens: int, taken_at_s: float) -> None:
        answer = self._answers.get(index)
        num_gaps = num_tokens
        if answer is None:
            # The first answer's first token came with Started; that of any other comes now.
            first_at_s = taken_at_s if self._answers else self._first_token_at_s
            if not self._answers:
                series.first_token_s.observe(first_at_s - self._accepted_at_s)
            answer = self._answers[index] = _Answer(first_at_s, first_at_s)
            num_gaps -= 1
        if num_gaps:
            gap_s = (taken_at_s - answer.last_token_at_s) / num_gaps
            for _ in range(num_gaps):  # a chunk's tokens share the time since the chunk before
                series.token_gap_s.observe(gap_s)
        answer.num_tokens += num_tokens
        answer.last_token_at_s = self._last_token_at_s = taken_at_s
        self._num_sent_tokens += num_tokens
        self._traffic.num_output_tokens += num_tokens
        if self._streamed:
            series.generation_tokens.inc(num_tokens)

    def _note_complete(self, series: RequestSeries, finished: pb.Finished) -> None:
        self._num_complete += 1
        self._outcome = COMPLETE_OUTCOMES[finished.reason]
        if self._trace is not None:
            self._trace.answer_ended(self._outcome.value)
        answer = self._answers.get(finished.answer_index)
        if answer is not None and answer.num_tokens > 1:
            time_s = answer.last_token_at_s - answer.first_token_at_s
            series.time_per_token_s.observe(time_s / (answer.num_tokens - 1))

    def _bill(self, series: RequestSeries) -> None:
        started = self._started
        if started is None:
            return
        if not self._streamed:
            series.prompt_tokens.inc(started.num_prompt_tokens)
            series.prompt_tokens_cached.inc(started.num_cached_tokens)
            series.generation_tokens.inc(self._num_sent_tokens)
        series.num_prompt_tokens.observe(started.num_prompt_tokens)
        series.num_computed_tokens.observe(started.num_prompt_tokens - started.num_cached_tokens)
        series.num_generation_tokens.observe(self._num_sent_tokens)

    def _observe_times(self, series: RequestSeries) -> None:
        longest = max((answer.num_tokens for answer in self._answers.values()), default=0)
        series.max_generation_tokens.observe(longest)
        series.total_s.observe(time.monotonic() - self._accepted_at_s)
        if self._answers:
            self._decode_s = max(self._last_token_at_s - self._first_token_at_s, 0.0)
            series.decode_s.observe(self._decode_s)
            self._observe_inference(series)

    def _observe_inference(self, series: RequestSeries) -> None:
        if self._prefill_s is not None and self._decode_s is not None:
            series.inference_s.observe(self._prefill_s + self._decode_s)

    def _tell_end(self, error_code: str, reason: str) -> None:
        trace_id = ""
        if self._trace is not None:
            trace_id = self._trace.end(
                time.monotonic(),
                num_output_tokens=self._num_sent_tokens,
                first_token_at_s=self._first_token_at_s,
                last_token_at_s=self._last_token_at_s,
                error=error_code,
            )
        if self._line is not None:
            self._line.end(
                self._started,
                num_output_tokens=self._num_sent_tokens,
                first_token_at_s=self._first_token_at_s,
                reason=reason,
                trace_id=trace_id,
            )


def _error_code(error: BaseException | None, outcome: Outcome) -> str:
    """What went wrong, in the words of the errors that clients get; empty if nothing did."""
    if outcome in COMPLETE_OUTCOMES.values():
        return ""
    if not isinstance(error, RequestError) and outcome in (Outcome.CANCELLED, Outcome.DEADLINE):
        return "CANCELLED" if outcome is Outcome.CANCELLED else "DEADLINE_EXCEEDED"
    return error_reason(error)
