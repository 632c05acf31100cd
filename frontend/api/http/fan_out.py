"""Runs the requests of one call concurrently, one per prompt."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.response_builder import EventBuilder, ResponseBuilder
from frontend.generation.admission import Permit
from frontend.generation.answer.collect import collect_answer
from frontend.generation.deadline import Deadline
from frontend.generation.pipeline import GenerationPipeline

_MAX_CONCURRENT = 256
"""Requests of one call that run at once: about the number of slots of an engine."""

_Run = Callable[[int, Sequence[Permit]], Awaitable[None]]
"""Runs one request, given its index and its permits, if it has any yet."""

_PER_TURN = 4
"""Requests started or cancelled per iteration of the event loop."""

Take = Callable[[int, pb.StreamGenerateResponse], Awaitable[None]]
"""Receives the index of a prompt and a message of its stream."""


async def stream_all(
    generations: GenerationPipeline, builder: EventBuilder, deadline: Deadline, take: Take, *, streamed: bool = True
) -> None:
    """Runs all requests and passes their messages to `take`, one at a time.

    Args:
        streamed: whether the client gets each message as it arrives; if not, it is billed at the end.

    Raises:
        RequestError: the first request that failed, or the deadline; the others are cancelled.
    """
    turn = asyncio.Lock()

    async def run(index: int, permits: Sequence[Permit]) -> None:
        spec = builder.specs[index]
        async with generations.open(spec, deadline, builder.extras, streamed=streamed, permits=permits) as answer:
            async for message in answer.messages():
                async with turn:
                    await take(index, message)

    async with deadline.enforce():
        await _run_all(generations, builder, run)


async def collect_all(
    generations: GenerationPipeline, builder: ResponseBuilder, deadline: Deadline
) -> list[pb.GenerateResponse]:
    """Runs all requests and returns their responses.

    Raises:
        RequestError: see `stream_all`.
    """
    responses = [pb.GenerateResponse() for _ in builder.specs]

    async def run(index: int, permits: Sequence[Permit]) -> None:
        spec = builder.specs[index]
        async with generations.open(spec, deadline, builder.extras, streamed=False, permits=permits) as answer:
            responses[index] = await collect_answer(answer.messages())

    async with deadline.enforce():
        await _run_all(generations, builder, run)
    return responses


async def _run_all(generations: GenerationPipeline, builder: EventBuilder, run: _Run) -> None:
    """Runs all requests of a call, at most `_MAX_CONCURRENT` at a time.

    All of them get their permits before the first one starts, so that no call is refused halfway.
    """
    if len(builder.specs) == 1:
        await run(0, ())
        return
    with generations.reserve(builder.specs) as permits_by_spec:
        left = iter(enumerate(permits_by_spec))

        async def run_some() -> None:
            for index, permits in left:
                await run(index, permits)

        tasks: list[asyncio.Task[None]] = []
        try:
            for _ in range(min(len(permits_by_spec), _MAX_CONCURRENT)):
                tasks.append(asyncio.create_task(run_some()))
                if len(tasks) % _PER_TURN == 0:
                    await asyncio.sleep(0)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels tasks, a few per iteration of the event loop because each cleans up; all at once if cancelled itself."""
    try:
        for number, task in enumerate(tasks):
            if task.cancel() and number % _PER_TURN == 0:
                await asyncio.sleep(0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
