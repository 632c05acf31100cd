"""Response builders: what each API implements to make its GenerationSpecs, events and response object."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from chairlift.service.end_reason import reasons_by_value
from chairlift.service.structured.output_constraint import OutputConstraint
from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.content_blocks import Blocks
from frontend.request.request import ChatPrompt, RequestExtras
from frontend.slices import Sliced

JsonObject = dict[str, Any]

_END_REASONS = reasons_by_value(pb.FinishReason.items())


class EventFormat(NamedTuple):
    """How an API writes server-sent events.

    Attributes:
        named: whether each event has the `type` of its content as its name.
        end: bytes that follow the last event.
    """

    named: bool
    end: bytes


UNNAMED_EVENTS = EventFormat(named=False, end=b"data: [DONE]\n\n")
"""Completions and Chat Completions."""

NAMED_EVENTS = EventFormat(named=True, end=b"")
"""Responses and Messages."""


class EventBuilder(Protocol):
    """Makes the GenerationSpecs of one call and the events of its stream."""

    @property
    def specs(self) -> Sequence[pb.GenerationSpec]:
        """The GenerationSpecs, one per prompt."""
        ...

    @property
    def request_id(self) -> str:
        """The request id, for the response header."""
        ...

    @property
    def extras(self) -> RequestExtras:
        """What the GenerationSpecs cannot express, the same for all."""
        ...

    @property
    def event_format(self) -> EventFormat:
        """Format of the stream."""
        ...

    def events(self, prompt_index: int, message: pb.StreamGenerateResponse) -> list[JsonObject]:
        """Returns the events for a message of a stream."""
        ...

    def last_events(self) -> list[JsonObject]:
        """Returns the events after the last message."""
        ...

    def failure_events(self, error: Exception) -> list[JsonObject]:
        """Returns the events that end a stream that failed after it started."""
        ...


class ResponseBuilder(EventBuilder, Protocol):
    """Makes the response object of a call from the GenerateResponses of its prompts."""

    def response(self, responses: Sequence[pb.GenerateResponse]) -> Sliced[JsonObject]:
        """Returns the response object of a call that does not stream."""
        ...


class SingleAnswerBuilder(ABC):
    """An EventBuilder for one answer to a conversation; the response object is made from the events as well.

    Args:
        spec: the GenerationSpec; its answer is parsed.
        chat: the conversation.
        constraint: what the answer must match; None: free text.
        max_tokens: default of max_tokens. It is not set in the spec, because a limit above the context length means as
            much as fits.
        one_call: the answer has at most one tool call.
    """

    event_format = NAMED_EVENTS

    def __init__(
        self,
        spec: pb.GenerationSpec,
        *,
        chat: ChatPrompt,
        constraint: OutputConstraint | None,
        max_tokens: int,
        one_call: bool,
    ) -> None:
        spec.output.parse = True
        self.specs = [spec]
        self.request_id = spec.request_id
        self.extras = RequestExtras(chat, constraint, max_tokens)
        self._blocks = Blocks(one_call=one_call)

    @abstractmethod
    def events(self, prompt_index: int, message: pb.StreamGenerateResponse) -> list[JsonObject]:
        """See EventBuilder.events."""

    def last_events(self) -> list[JsonObject]:
        """See EventBuilder.last_events."""
        return []

    @abstractmethod
    def failure_events(self, error: Exception) -> list[JsonObject]:
        """See EventBuilder.failure_events."""

    @abstractmethod
    def answer(self) -> JsonObject:
        """Returns the response object, after `events` has been called with every message."""


def finish_reason(finished: pb.Finished) -> str:
    """Returns OpenAI's finish reason."""
    return _END_REASONS[finished.reason].finish_reason
