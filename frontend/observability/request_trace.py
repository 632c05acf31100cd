"""One request as spans: a server span around all of it, and the phases queue, prefill and decode inside.

Everything is handed over when it is known to the end, so that a running request costs nothing. No text of any prompt or
answer is part of it. Pure: times of time.monotonic() in, spans out.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from chairlift.v1 import generation_service_pb2 as pb
from frontend.generation.answer.timing import EngineAccount
from frontend.observability.trace_context import Origin

AttributeValue = str | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


class RequestSpan(Protocol):
    """A server span that has been handed over; phases may still follow.

    Attributes:
        trace_id: of the trace it is part of, in hexadecimal.
    """

    trace_id: str

    def phase(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """Hands over a span inside it."""


class Spans(Protocol):
    """Where spans go."""

    def request(
        self, origin: Origin, start_s: float, end_s: float, attributes: Attributes, *, error: str
    ) -> RequestSpan:
        """Hands over the server span of a request that has ended.

        Args:
            error: the code of what went wrong; empty if nothing did.
        """


class RequestTrace:
    """What is noted of one request until its end. Where its requests went and when is `RequestWatch`'s to tell.

    Args:
        spans: where it goes.
        origin: the call.
        spec: as received.
        is_chat: whether the prompt is a conversation.
        now_s: when it arrived.
    """

    def __init__(self, spans: Spans, origin: Origin, spec: pb.GenerationSpec, *, is_chat: bool, now_s: float) -> None:
        self._spans = spans
        self._origin = origin
        self._arrived_at_s = now_s
        self._attributes = dict[str, AttributeValue](origin.attributes) | _asked(spec, is_chat=is_chat)
        self._finish_reasons: list[str] = []
        self._span: RequestSpan | None = None
        self._engine_phases: list[tuple[str, float, float, Attributes]] = []

    def answer_ended(self, reason: str) -> None:
        """One of its answers is complete."""
        self._finish_reasons.append(reason)

    def started(self, started: pb.Started) -> None:
        """Its first token is here."""
        self._attributes |= {
            "gen_ai.response.model": started.model,
            "gen_ai.response.id": started.request_id,
            "gen_ai.usage.input_tokens": started.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": started.num_cached_tokens,
        }

    def account(self, account: EngineAccount, *, accepted_at_s: float, submitted_at_s: float) -> None:
        """The engine's account, which may come before the request's end or after it."""
        ran_at_s = submitted_at_s + account.queued_s
        self._engine_phases.append(("queue", accepted_at_s, ran_at_s, {}))
        if account.num_output_tokens:
            preemptions = {"chairlift.num_preemptions": account.num_preemptions}
            self._engine_phases.append(("prefill", ran_at_s, ran_at_s + account.prefill_s, preemptions))
        if self._span is not None:
            self._hand_over(self._span)

    def end(
        self, now_s: float, *, num_output_tokens: int, first_token_at_s: float, last_token_at_s: float, error: str
    ) -> str:
        """It has ended; nothing but `account` may follow. Returns the id of its trace.

        Args:
            num_output_tokens: tokens that its client was sent; without any, the two times mean nothing.
            error: the code of what went wrong; empty if nothing did.
        """
        self._attributes["gen_ai.usage.output_tokens"] = num_output_tokens
        if self._finish_reasons:
            self._attributes["gen_ai.response.finish_reasons"] = self._finish_reasons
        self._span = self._spans.request(self._origin, self._arrived_at_s, now_s, self._attributes, error=error)
        if num_output_tokens:
            self._span.phase("decode", first_token_at_s, last_token_at_s, {})
        self._hand_over(self._span)
        return self._span.trace_id

    def _hand_over(self, span: RequestSpan) -> None:
        for phase in self._engine_phases:
            span.phase(*phase)
        self._engine_phases.clear()


def _asked(spec: pb.GenerationSpec, *, is_chat: bool) -> dict[str, AttributeValue]:
    """What the request sets, in the words of OpenTelemetry's conventions for generative AI."""
    asked: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "chairlift",
    }
    if spec.model:
        asked["gen_ai.request.model"] = spec.model[:128]
    if spec.HasField("num_answers"):
        asked["gen_ai.request.choice.count"] = spec.num_answers
    if spec.stop.HasField("max_tokens"):
        asked["gen_ai.request.max_tokens"] = spec.stop.max_tokens
    for name in _SAMPLING:
        if spec.sampling.HasField(name):
            value = getattr(spec.sampling, name)
            # An OpenTelemetry integer has 64 bits and a sign.
            asked[f"gen_ai.request.{name}"] = str(value) if name == "seed" else value
    return asked
