"""Answers to JSON, whole or as events, without stopping everybody else's streams for a large one."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.json_writer import chunks, encoded, json_pieces
from frontend.api.http.response_builder import EventFormat, EventJob, Job, JsonObject
from frontend.slices import Sliced, at_once, in_slices


class JsonAnswer(Response):
    """An object in chunks, each of which waits until the client has taken the one before."""

    media_type = "application/json"

    def __init__(self, body: Sequence[bytes], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers=headers)
        self.headers["content-length"] = str(sum(map(len, body)))
        self._chunks = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Sends it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def asks_for_prompt_logprobs(job: EventJob) -> bool:
    """Whether a part of its answer may be a million numbers: 1.7 s of work and 54 MB."""
    return any(spec.output.HasField("prompt_logprobs") for spec in job.specs)


async def rendered(job: Job, responses: Sequence[pb.GenerateResponse]) -> list[bytes]:
    """The body of the answer.

    Those with log-probabilities of a prompt are a thread's, which makes them in pieces, so that the event loop gets its
    turns.
    """
    if asks_for_prompt_logprobs(job):
        return await asyncio.to_thread(lambda: _joined(json_pieces(at_once(job.whole(responses)))))
    return await rendered_value(await in_slices(job.whole(responses)))


async def rendered_value(content: Any) -> list[bytes]:
    """A body of any size."""
    return await in_slices(_sliced(json_pieces(content)))


def rendered_object(content: JsonObject) -> bytes:
    """A body of ordinary size."""
    return encoded(content).encode()


def rendered_events(contents: Sequence[JsonObject], event_format: EventFormat) -> bytes:
    """Server-sent events of ordinary size."""
    return b"".join(
        f"{_event_name(content, event_format)}data: {encoded(content)}\n\n".encode() for content in contents
    )


async def rendered_prompt(job: EventJob, prompt_index: int, message: pb.StreamGenerateResponse) -> list[bytes]:
    """The events that a prompt is part of; those of one that has its log-probabilities are a thread's too."""
    if asks_for_prompt_logprobs(job):
        return await asyncio.to_thread(
            lambda: _joined(_event_pieces(job.events(prompt_index, message), job.event_format))
        )
    return await in_slices(_sliced(_event_pieces(job.events(prompt_index, message), job.event_format)))


def _event_pieces(contents: Sequence[JsonObject], event_format: EventFormat) -> Iterator[str]:
    for content in contents:
        yield f"{_event_name(content, event_format)}data: "
        yield from json_pieces(content)
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
