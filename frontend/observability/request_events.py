"""The events of one request's life, and the interface of the observers that count, bill, trace and log them."""

from collections.abc import Callable
from dataclasses import dataclass

from chairlift.v1 import generation_service_pb2 as pb
from frontend.observability.outcome import Outcome
from frontend.types import EngineAccount


@dataclass(slots=True)
class RequestProgress:
    """State of one request, written by RequestWatch alone. Times are time.monotonic(), 0.0 until they are known.

    Attributes:
        streamed: whether the client gets tokens as they arrive. If not, it is billed when all are there.
        started: the Started message once it has been sent; None: there is no token yet.
        num_sent_tokens: output tokens sent to the client.
        trace_id: set by the tracing observer when the request ends; empty: it is not traced.
    """

    arrived_at_s: float
    streamed: bool
    is_accepted: bool = False
    request_id: str = ""
    model_name: str = ""
    engine: str = ""
    num_answers: int = 1
    accepted_at_s: float = 0.0
    submitted_at_s: float = 0.0
    first_token_at_s: float = 0.0
    last_token_at_s: float = 0.0
    started: pb.Started | None = None
    num_sent_tokens: int = 0
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended.

    Attributes:
        outcome: None: the request was refused for what it asks; it was never accepted.
        is_complete: whether all its answers are complete.
        error_code: code of the error, as clients get it; empty: there was none.
    """

    outcome: Outcome | None
    is_complete: bool
    error_code: str

    @property
    def reason(self) -> str:
        """The outcome, or the error's code. Never its text, which may quote the request."""
        return self.error_code or (self.outcome.value if self.outcome is not None else "")


class RequestEvents:
    """Observer of requests. Subclasses override the events they need; the others do nothing."""

    def received(self, request: RequestProgress) -> None:
        """The request has arrived."""

    def accepted(self, request: RequestProgress, prompt_text: Callable[[], str]) -> None:
        """The request can be served, as far as its fields say."""

    def submitted(self, request: RequestProgress, max_tokens: int) -> None:
        """The request has been submitted; `request.engine` is the engine that it is counted for from now on."""

    def started(self, request: RequestProgress, started: pb.Started) -> None:
        """The first token has been sent."""

    def tokens_sent(self, request: RequestProgress, answer_index: int, num_tokens: int, at_s: float) -> None:
        """Output tokens have been sent; they were ready at `at_s`."""

    def answer_finished(self, request: RequestProgress, finished: pb.Finished) -> None:
        """One answer is complete."""

    def engine_account(self, request: RequestProgress, account: EngineAccount) -> None:
        """The engine has reported the request's times, before or after its end."""

    def ended(self, request: RequestProgress, end: RequestEnd) -> None:
        """The request has ended."""
