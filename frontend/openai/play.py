"""The generations of one call, all its prompts at once."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from chairlift.v1 import generation_service_pb2 as pb
from frontend.answer import whole_answer
from frontend.answer_group import AnswerGroup
from frontend.generation import Generations
from frontend.openai.job import Job

Take = Callable[[int, pb.StreamGenerateResponse], Awaitable[None]]
"""Gets the index of a prompt and a message for it."""


async def play_stream(generations: Generations, job: Job, take: Take) -> None:
    """Runs all requests and hands over their messages, one at a time.

    Raises:
        RequestError: of the first request that fails; the others are cancelled.
    """
    turn = asyncio.Lock()

    async def play(index: int) -> None:
        async with _open(generations, job, index, streamed=True) as answer:
            async for message in answer.messages():
                async with turn:
                    await take(index, message)

    await _all(play, len(job.specs))


async def play_whole(generations: Generations, job: Job) -> list[pb.GenerateResponse]:
    """Runs all requests to their ends.

    Raises:
        RequestError: as `play_stream`.
    """
    responses = [pb.GenerateResponse() for _ in job.specs]

    async def play(index: int) -> None:
        async with _open(generations, job, index, streamed=False) as answer:
            responses[index] = await whole_answer(answer.messages())

    await _all(play, len(job.specs))
    return responses


def _open(
    generations: Generations, job: Job, index: int, *, streamed: bool
) -> AbstractAsyncContextManager[AnswerGroup]:
    return generations.open(
        job.specs[index],
        _no_deadline,
        chat=job.chat,
        default_max_tokens=job.default_max_tokens,
        streamed=streamed,
    )


async def _all(play: Callable[[int], Awaitable[None]], count: int) -> None:
    if count == 1:
        await play(0)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(count):
                group.create_task(_coroutine(play, index))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _coroutine(play: Callable[[int], Awaitable[None]], index: int) -> None:
    await play(index)


def _no_deadline() -> None:
    """HTTP has no word for a deadline; a client that has waited long enough closes its connection."""
