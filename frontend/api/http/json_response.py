"""Serializes responses and events to JSON without blocking the event loop for large ones."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.json_writer import chunks, encoded, json_pieces
from frontend.api.http.response_builder import (
    EventBuilder,
    EventFormat,
    JsonObject,
    ResponseBuilder,
    SingleAnswerBuilder,
)
from frontend.slices import Sliced, at_once, in_slices

_DEPTHS = {"item": 6, "response": 8}
"""Levels of events with such a member that are split, down to the rows of log-probabilities; others have 5."""


class ChunkedJsonResponse(Response):
    """A JSON body in chunks; each is sent when the client has read the previous one."""

    media_type = "application/json"

    def __init__(self, body: Sequence[bytes], headers: Mapping[str, str] | None) -> None:
        super().__init__(headers=headers)
        self.headers["content-length"] = str(sum(map(len, body)))
        self._chunks = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Sends the body."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def has_prompt_logprobs(builder: EventBuilder) -> bool:
    """Whether the response may have a million log-probabilities: 1.7 s of work and 54 MB."""
    return any(spec.output.HasField("prompt_logprobs") for spec in builder.specs)


async def rendered(builder: ResponseBuilder, responses: Sequence[pb.GenerateResponse]) -> list[bytes]:
    """Returns the body of a response. One with log-probabilities of a prompt is made in a thread, in pieces, so that
    the event loop gets the GIL in between.
    """
    if has_prompt_logprobs(builder):
        return await asyncio.to_thread(lambda: _joined(json_pieces(at_once(builder.response(responses)))))
    return await rendered_value(await in_slices(builder.response(responses)))


async def rendered_answer(builder: SingleAnswerBuilder) -> list[bytes]:
    """Returns the body of a response to one conversation."""
    return await in_slices(_sliced(json_pieces(builder.answer(), _DEPTHS["response"] - 1)))


async def rendered_value(content: Any) -> list[bytes]:
    """Serializes a body of any size."""
    return await in_slices(_sliced(json_pieces(content)))


def rendered_events(contents: Sequence[JsonObject], event_format: EventFormat) -> bytes:
    """Serializes small server-sent events."""
    return b"".join(
        f"{_event_name(content, event_format)}data: {encoded(content)}\n\n".encode() for content in contents
    )


async def rendered_prompt(builder: EventBuilder, prompt_index: int, message: pb.StreamGenerateResponse) -> list[bytes]:
    """Serializes the events that contain a prompt; see `rendered` for its log-probabilities."""
    if has_prompt_logprobs(builder):
        return await asyncio.to_thread(
            lambda: _joined(event_pieces(builder.events(prompt_index, message), builder.event_format))
        )
    return await in_slices(_sliced(event_pieces(builder.events(prompt_index, message), builder.event_format)))


async def rendered_message(builder: EventBuilder, prompt_index: int, message: pb.StreamGenerateResponse) -> list[bytes]:
    """Serializes the events of any other message. Log-probabilities of many tokens may come with one."""
    contents = builder.events(prompt_index, message)
    if builder.specs[prompt_index].output.HasField("top_logprobs"):
        return await in_slices(_sliced(event_pieces(contents, builder.event_format)))
    return [rendered_events(contents, builder.event_format)]


def event_pieces(contents: Sequence[JsonObject], event_format: EventFormat) -> Iterator[str]:
    """Yields the text of server-sent events of any size."""
    for content in contents:
        yield f"{_event_name(content, event_format)}data: "
        yield from json_pieces(content, max(_DEPTHS.get(name, 5) for name in content))
        yield "\n\n"


def _event_name(content: JsonObject, event_format: EventFormat) -> str:
    return f"event: {content['type']}\n" if event_format.named else ""


def _joined(pieces: Iterable[str]) -> list[bytes]:
    return [chunk for chunk in chunks(pieces) if chunk is not None]


def _sliced(pieces: Iterable[str]) -> Sliced[list[bytes]]:
    written = []
    for chunk in chunks(pieces):
        if chunk is None:
            yield
        else:
            written.append(chunk)
    return written
