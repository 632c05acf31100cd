"""Follows one request from its arrival to its end and reports the events to observers.

The watch wraps everything that `frontend/generation` does for a request; the exception that leaves the block tells
how the request ended. Tokens are counted at the last place before the transport: a caller that asks for the next
message has sent the previous one.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import RequestError, error_reason
from frontend.observability.outcome import COMPLETE_OUTCOMES, Outcome, failed_outcome, is_refusal
from frontend.observability.request_events import RequestEnd, RequestEvents, RequestProgress
from frontend.types import EngineAccount


class RequestWatch:
    """A context manager around one request.

    Invariant: observers get `received` first and `ended` exactly once.

    Args:
        observers: are notified in this order: tracing before the log, whose line has the trace's id.
        deadline_passed: tells whether the call's deadline has passed.
        streamed: whether tokens are sent as they arrive. If not, nothing is sent, and billed, before all are there.
    """

    def __init__(
        self, observers: Sequence[RequestEvents], deadline_passed: Callable[[], bool], *, streamed: bool
    ) -> None:
        self._observers = list(observers)
        self._deadline_passed = deadline_passed
        self._request = RequestProgress(time.monotonic(), streamed)
        self._num_complete = 0
        self._outcome: Outcome | None = None

    def __enter__(self) -> Self:
        for observer in self._observers:
            observer.received(self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end = self._end(error)
        for observer in self._observers:
            observer.ended(self._request, end)

    def add(self, observer: RequestEvents) -> None:
        """Adds an observer of what is to come."""
        self._observers.append(observer)

    def accept(
        self,
        request_id: str,
        num_answers: int,
        model_name: str,
        engine: str,
        prompt_text: Callable[[], str],
        *,
        now_s: float,
    ) -> None:
        """Notes that the request can be served; it counts for `engine` unless another one takes it."""
        request = self._request
        request.is_accepted, request.accepted_at_s = True, now_s
        request.request_id, request.num_answers = request_id, num_answers
        request.model_name, request.engine = model_name, engine
        for observer in self._observers:
            observer.accepted(request, prompt_text)

    def submit(self, *, max_tokens: int, engine: str | None, now_s: float) -> None:
        """Notes the submission. The request counts for this engine from now on, also after a failover; None: it waits
        for an engine.
        """
        self._request.submitted_at_s = now_s
        if engine is not None:
            self._request.engine = engine
        for observer in self._observers:
            observer.submitted(self._request, max_tokens)

    async def follow(
        self, messages: AsyncIterator[pb.StreamGenerateResponse]
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        """Passes on the messages of the answers and reports what was sent."""
        request = self._request
        async for message in messages:
            now_s = time.monotonic()
            match message.WhichOneof("event"):
                case "chunk":
                    yield message
                    chunk = message.chunk
                    if chunk.num_tokens:  # else it is text that lagged behind its tokens
                        self._tokens_sent(chunk.answer_index, chunk.num_tokens, now_s)
                case "started":
                    request.first_token_at_s = now_s  # if it has one
                    yield message
                    request.started = message.started
                    for observer in self._observers:
                        observer.started(request, message.started)
                case "finished":
                    self._num_complete += 1
                    self._outcome = COMPLETE_OUTCOMES[message.finished.reason]
                    for observer in self._observers:
                        observer.answer_finished(request, message.finished)
                    yield message

    def account(self, account: EngineAccount) -> None:
        """Reports the engine's account of the request, which may arrive after its end."""
        for observer in self._observers:
            observer.engine_account(self._request, account)

    def _tokens_sent(self, answer_index: int, num_tokens: int, at_s: float) -> None:
        self._request.num_sent_tokens += num_tokens
        self._request.last_token_at_s = at_s
        for observer in self._observers:
            observer.tokens_sent(self._request, answer_index, num_tokens, at_s)

    def _end(self, error: BaseException | None) -> RequestEnd:
        if not self._request.is_accepted or (is_refusal(error) and self._request.started is None):
            return RequestEnd(None, is_complete=False, error_code=error_reason(error))
        if self._outcome is not None and error is None and self._num_complete == self._request.num_answers:
            return RequestEnd(self._outcome, is_complete=True, error_code="")
        outcome = failed_outcome(error, deadline_passed=self._deadline_passed())
        return RequestEnd(outcome, is_complete=False, error_code=_error_code(error, outcome))


def _error_code(error: BaseException | None, outcome: Outcome) -> str:
    """Returns the error's code; a cancellation has no error of its own."""
    if not isinstance(error, RequestError) and outcome in (Outcome.CANCELLED, Outcome.DEADLINE):
        return "CANCELLED" if outcome is Outcome.CANCELLED else "DEADLINE_EXCEEDED"
    return error_reason(error)
