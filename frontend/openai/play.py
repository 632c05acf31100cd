"""The generations of one call, all its prompts at once."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from chairlift.v1 import generation_service_pb2 as pb
from frontend.answer.group import AnswerGroup
from frontend.answer.whole import whole_answer
from frontend.call_deadline import CallDeadline
from frontend.generation import Generations
from frontend.openai.job import EventJob, Job

Take = Callable[[int, pb.StreamGenerateResponse], Awaitable[None]]
"""Gets the index of a prompt and a message for it."""


async def play_stream(
    generations: Generations, job: EventJob, deadline: CallDeadline, take: Take, *, streamed: bool = True
) -> None:
    """Runs all requests and hands over their messages, one at a time.

    Args:
        streamed: whether the client gets each message as it comes; if not, it is billed for nothing before the end.

    Raises:
        RequestError: of the first request that fails, or of the deadline; the others are cancelled.
    """
    turn = asyncio.Lock()

    async def play(index: int) -> None:
        async with _open(generations, job, index, deadline, streamed=streamed) as answer:
            async for message in answer.messages():
                async with turn:
                    await take(index, message)

    async with deadline.enforced():
        await _all(play, len(job.specs))


async def play_whole(generations: Generations, job: Job, deadline: CallDeadline) -> list[pb.GenerateResponse]:
    """Runs all requests to their ends.

    Raises:
        RequestError: as `play_stream`.
    """
    responses = [pb.GenerateResponse() for _ in job.specs]

    async def play(index: int) -> None:
        async with _open(generations, job, index, deadline, streamed=False) as answer:
            responses[index] = await whole_answer(answer.messages())

    async with deadline.enforced():
        await _all(play, len(job.specs))
    return responses


def _open(
    generations: Generations, job: EventJob, index: int, deadline: CallDeadline, *, streamed: bool
) -> AbstractAsyncContextManager[AnswerGroup]:
    return generations.open(
        job.specs[index],
        deadline.remaining_s,
        chat=job.chat,
        form=job.form,
        default_max_tokens=job.default_max_tokens,
        prompt_options=job.prompt_options,
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
