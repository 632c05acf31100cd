"""What all kinds of generation have in common: their requests to the engine, and the objects that hold the answers."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from chairlift.service.end_reason import reasons_by_value
from chairlift.v1 import generation_service_pb2 as pb
from frontend.request.prompt_options import PromptOptions
from frontend.request.request import ChatPrompt
from frontend.slices import Sliced
from frontend.text.structured.output_format import OutputForm

JsonObject = dict[str, Any]

_END_REASONS = reasons_by_value(pb.FinishReason.items())


class EventFormat(NamedTuple):
    """How an API writes its stream of server-sent events.

    Attributes:
        named: each event carries the `type` of its content as its name.
        end: follows the last event.
    """

    named: bool
    end: bytes


UNNAMED_EVENTS = EventFormat(named=False, end=b"data: [DONE]\n\n")
"""Completions and Chat Completions."""

NAMED_EVENTS = EventFormat(named=True, end=b"")
"""Responses and Messages."""


class EventJob(Protocol):
    """One call: what is asked of the engine, and how the answers look as a stream."""

    @property
    def specs(self) -> Sequence[pb.GenerationSpec]:
        """The requests, one per prompt."""
        ...

    @property
    def request_id(self) -> str:
        """For the answer's header."""
        ...

    @property
    def chat(self) -> ChatPrompt | None:
        """The prompt of a conversation; None: the requests have prompts of their own."""
        ...

    @property
    def form(self) -> OutputForm | None:
        """What the answers are held to; None: nothing."""
        ...

    @property
    def default_max_tokens(self) -> int:
        """Length of an answer that the request does not limit, as far as it fits."""
        ...

    @property
    def prompt_options(self) -> PromptOptions:
        """How prompts become token ids."""
        ...

    @property
    def event_format(self) -> EventFormat:
        """How the stream is written."""
        ...

    def events(self, prompt_index: int, message: pb.StreamGenerateResponse) -> list[JsonObject]:
        """What a message of a stream becomes."""
        ...

    def last_events(self) -> list[JsonObject]:
        """What follows the last message."""
        ...

    def failure_events(self, error: Exception) -> list[JsonObject]:
        """What a stream that has begun ends with when it fails."""
        ...


class Job(EventJob, Protocol):
    """A call whose whole answer is made of whole responses."""

    def whole(self, responses: Sequence[pb.GenerateResponse]) -> Sliced[JsonObject]:
        """The answer to a call that does not stream; one response per prompt."""
        ...


class SingleAnswerJob(EventJob, Protocol):
    """A call for one answer, whose whole is what its events have added up to."""

    def answer(self) -> JsonObject:
        """The answer, once every message has been taken by `events`."""
        ...


def finish_reason(finished: pb.Finished) -> str:
    """OpenAI's word for why an answer ended."""
    return _END_REASONS[finished.reason].finish_reason
