"""Answers to JSON, whole or as events, without stopping everybody else's streams for a large one."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

from chairlift.v1 import generation_service_pb2 as pb
from frontend.openai.job import EventFormat, EventJob, Job, JsonObject
from frontend.openai.logprobs import PromptRows

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_DEPTH = 4  # of the rows of choices[].prompt_logprobs


def asks_for_prompt_logprobs(job: EventJob) -> bool:
    """Whether a part of its answer may be a million numbers: 1.7 s of work and 54 MB."""
    return any(spec.output.HasField("prompt_logprobs") for spec in job.specs)


async def rendered(job: Job, responses: Sequence[pb.GenerateResponse]) -> bytes:
    """The body of the answer.

    Those with log-probabilities of a prompt are a thread's, which makes them in pieces, so that the event loop gets its
    turns.
    """
    if not asks_for_prompt_logprobs(job):
        return rendered_object(job.whole(responses))
    return await asyncio.to_thread(
        lambda: b"".join(piece.encode() for piece in _pieces(job.whole(responses), _DEPTH)),
    )


def rendered_object(content: JsonObject) -> bytes:
    """A body of ordinary size."""
    return _encode(content).encode()


def rendered_events(contents: Sequence[JsonObject], event_format: EventFormat) -> bytes:
    """Server-sent events."""
    return b"".join(_event(content, event_format) for content in contents)


async def rendered_prompt(job: EventJob, prompt_index: int, message: pb.StreamGenerateResponse) -> bytes:
    """The events of a prompt that has its log-probabilities, made by a thread too."""
    return await asyncio.to_thread(lambda: rendered_events(job.events(prompt_index, message), job.event_format))


def _event(content: JsonObject, event_format: EventFormat) -> bytes:
    name = f"event: {content['type']}\n" if event_format.named else ""
    return f"{name}data: {_encode(content)}\n\n".encode()


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """The same JSON; one call of the library's encoder, which lets no other thread run, sees only a part of it."""
    if depth and isinstance(value, dict):
        yield "{"
        for position, (name, member) in enumerate(value.items()):
            yield f"{',' * bool(position)}{_encode(name)}:"
            yield from _pieces(member, depth - 1)
        yield "}"
    elif depth and isinstance(value, list | PromptRows):
        yield "["
        for position, member in enumerate(value):
            yield "," * bool(position)
            yield from _pieces(member, depth - 1)
        yield "]"
    else:
        yield _encode(value)
