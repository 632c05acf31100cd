"""Traces one request: a server span around it, with a child span for each of the phases queue, prefill and decode.

Spans are created when they have ended, so that a running request costs nothing. They contain no text of prompts or
answers. Pure: times of time.monotonic() in, spans out.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from chairlift.v1 import generation_service_pb2 as pb
from frontend.observability.outcome import COMPLETE_OUTCOMES
from frontend.observability.request_events import RequestEnd, RequestEvents, RequestProgress
from frontend.observability.trace_context import Origin
from frontend.types import EngineAccount

AttributeValue = str | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


class RequestSpan(Protocol):
    """A server span that has been exported; phases may still follow.

    Attributes:
        trace_id: trace id in hexadecimal.
    """

    trace_id: str

    def phase(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """Exports a child span."""


class Spans(Protocol):
    """Exports spans."""

    def request(
        self, origin: Origin, start_s: float, end_s: float, attributes: Attributes, *, error: str
    ) -> RequestSpan:
        """Exports the server span of a request that has ended.

        Args:
            error: the error's code; empty: no error.
        """


class RequestTrace(RequestEvents):
    """Collects the attributes and phases of one request.

    Args:
        spans: exports the spans.
        origin: the call.
        spec: as received.
        is_chat: whether the prompt is a conversation.
    """

    def __init__(self, spans: Spans, origin: Origin, spec: pb.GenerationSpec, *, is_chat: bool) -> None:
        self._spans = spans
        self._origin = origin
        self._attributes = dict[str, AttributeValue](origin.attributes) | _request_attributes(spec, is_chat=is_chat)
        self._finish_reasons: list[str] = []
        self._span: RequestSpan | None = None
        self._engine_phases: list[tuple[str, float, float, Attributes]] = []

    def started(self, request: RequestProgress, started: pb.Started) -> None:
        self._attributes |= {
            "gen_ai.response.model": started.model,
            "gen_ai.response.id": started.request_id,
            "gen_ai.usage.input_tokens": started.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": started.num_cached_tokens,
        }

    def answer_finished(self, request: RequestProgress, finished: pb.Finished) -> None:
        self._finish_reasons.append(COMPLETE_OUTCOMES[finished.reason].value)

    def engine_account(self, request: RequestProgress, account: EngineAccount) -> None:
        ran_at_s = request.submitted_at_s + account.queued_s
        self._engine_phases.append(("queue", request.accepted_at_s, ran_at_s, {}))
        if account.num_output_tokens:
            preemptions = {"chairlift.num_preemptions": account.num_preemptions}
            self._engine_phases.append(("prefill", ran_at_s, ran_at_s + account.prefill_s, preemptions))
        if self._span is not None:
            self._export_phases(self._span)

    def ended(self, request: RequestProgress, end: RequestEnd) -> None:
        self._attributes["gen_ai.usage.output_tokens"] = request.num_sent_tokens
        if self._finish_reasons:
            self._attributes["gen_ai.response.finish_reasons"] = self._finish_reasons
        self._span = self._spans.request(
            self._origin, request.arrived_at_s, time.monotonic(), self._attributes, error=end.error_code
        )
        request.trace_id = self._span.trace_id
        if request.num_sent_tokens:
            self._span.phase("decode", request.first_token_at_s, request.last_token_at_s, {})
        self._export_phases(self._span)

    def _export_phases(self, span: RequestSpan) -> None:
        for phase in self._engine_phases:
            span.phase(*phase)
        self._engine_phases.clear()


def _request_attributes(spec: pb.GenerationSpec, *, is_chat: bool) -> dict[str, AttributeValue]:
    """Returns what the request sets, under the names of OpenTelemetry's semantic conventions for generative AI."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "chairlift",
    }
    if spec.model:
        attributes["gen_ai.request.model"] = spec.model[:128]
    if spec.HasField("num_answers"):
        attributes["gen_ai.request.choice.count"] = spec.num_answers
    if spec.stop.HasField("max_tokens"):
        attributes["gen_ai.request.max_tokens"] = spec.stop.max_tokens
    for name in _SAMPLING:
        if spec.sampling.HasField(name):
            value = getattr(spec.sampling, name)
            # An OpenTelemetry integer has 64 bits and a sign.
            attributes[f"gen_ai.request.{name}"] = str(value) if name == "seed" else value
    return attributes
