"""The generations of one call, all its prompts at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.response_builder import EventJob, Job
from frontend.generation.admission import Permit
from frontend.generation.answer.collect import whole_answer
from frontend.generation.answer.group import AnswerGroup
from frontend.generation.deadline import Deadline
from frontend.generation.pipeline import Generations

_OPEN_AT_ONCE = 256
"""Requests of one call that are with the engine, or on their way there: as many as engines have slots for."""

_Play = Callable[[int, Sequence[Permit]], Awaitable[None]]
"""Plays one request, which has places in the queue, or none yet."""

_PER_TURN = 4
"""Requests that begin, or are cancelled, in one turn of the event loop."""

Take = Callable[[int, pb.StreamGenerateResponse], Awaitable[None]]
"""Gets the index of a prompt and a message for it."""


async def play_stream(
    generations: Generations, job: EventJob, deadline: Deadline, take: Take, *, streamed: bool = True
) -> None:
    """Runs all requests and hands over their messages, one at a time.

    Args:
        streamed: whether the client gets each message as it comes; if not, it is billed for nothing before the end.

    Raises:
        RequestError: of the first request that fails, or of the deadline; the others are cancelled.
    """
    turn = asyncio.Lock()

    async def play(index: int, permits: Sequence[Permit]) -> None:
        async with _open(generations, job, index, deadline, permits, streamed=streamed) as answer:
            async for message in answer.messages():
                async with turn:
                    await take(index, message)

    async with deadline.enforce():
        await _all(generations, job, play)


async def play_whole(generations: Generations, job: Job, deadline: Deadline) -> list[pb.GenerateResponse]:
    """Runs all requests to their ends.

    Raises:
        RequestError: as `play_stream`.
    """
    responses = [pb.GenerateResponse() for _ in job.specs]

    async def play(index: int, permits: Sequence[Permit]) -> None:
        async with _open(generations, job, index, deadline, permits, streamed=False) as answer:
            responses[index] = await whole_answer(answer.messages())

    async with deadline.enforce():
        await _all(generations, job, play)
    return responses


def _open(
    generations: Generations,
    job: EventJob,
    index: int,
    deadline: Deadline,
    permits: Sequence[Permit],
    *,
    streamed: bool,
) -> AbstractAsyncContextManager[AnswerGroup]:
    return generations.open(
        job.specs[index],
        deadline,
        chat=job.chat,
        form=job.form,
        default_max_tokens=job.default_max_tokens,
        prompt_options=job.prompt_options,
        streamed=streamed,
        permits=permits,
    )


async def _all(
    generations: Generations, job: EventJob, play: Callable[[int, Sequence[Permit]], Awaitable[None]]
) -> None:
    """Plays all requests of a job, at most `_OPEN_AT_ONCE` at a time. All have their places in the queue before the
    first begins; nothing is begun that could not be finished.
    """
    if len(job.specs) == 1:
        await play(0, ())
        return
    with generations.places(job.specs) as places:
        left = iter(enumerate(places))

        async def play_some() -> None:
            for index, permits in left:
                await play(index, permits)

        tasks: list[asyncio.Task[None]] = []
        try:
            for _ in range(min(len(places), _OPEN_AT_ONCE)):
                tasks.append(asyncio.create_task(play_some()))
                await _breathe(tasks)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels tasks, a few per turn of the event loop, because each has things to give back; at once if it must be."""
    try:
        for number, task in enumerate(tasks):
            if task.cancel() and number % _PER_TURN == 0:
                await asyncio.sleep(0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _breathe(tasks: Sequence[asyncio.Task[None]]) -> None:
    if len(tasks) % _PER_TURN == 0:
        await asyncio.sleep(0)
