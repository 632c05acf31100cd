"""Several answers to one request as the messages of one public stream.

The first answer computes the prompt. The others are submitted when its first token is there, so that they find the
prompt's blocks in the engine's prefix cache; from then on the engine treats all of them alike. One that finds the
engine's queue full is submitted again: the request has been accepted, and its first answer is under way. Any other
error of one ends the group. Knows neither the engine's link nor what an answer is made of.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import QueueFull
from frontend.generation.answer.answer import Answer
from frontend.observability.request_watch import RequestWatch

_RETRY_S = 0.25
"""Longest pause before another answer is submitted again: a seat has been free meanwhile, or will be."""


class AnswerGroup:
    """The answers to one request. Close it when nobody reads it any more.

    Args:
        num_answers: at least 1.
        submit: submits answer number i and returns it; called once for each, and again for one that was refused.
        watch: counts what is sent.

    Raises:
        RequestError: `submit` did.
    """

    def __init__(self, num_answers: int, submit: Callable[[int], Answer], watch: RequestWatch) -> None:
        self._num_answers = num_answers
        self._submit = submit
        self._watch = watch
        self._first = submit(0)
        self._waits: dict[asyncio.Task[pb.StreamGenerateResponse | None], AsyncIterator[pb.StreamGenerateResponse]] = {}

    def messages(self) -> AsyncIterator[pb.StreamGenerateResponse]:
        """Started, then the Chunks of all answers as they come, and one Finished for each.

        Raises:
            RequestError: one of the answers failed.
        """
        messages = self._first.messages()
        return self._watch.follow(messages if self._num_answers == 1 else self._merged(messages))

    async def _merged(
        self, first: AsyncIterator[pb.StreamGenerateResponse]
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        started = await anext(first)
        self._wait_for(first)
        for index in range(1, self._num_answers):
            self._wait_for(self._other(index))
            await asyncio.sleep(0)  # each copies the prompt, on its way to the engine too: one per turn of the loop
        yield started
        while self._waits:
            done, _ = await asyncio.wait(self._waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                message = wait.result()
                answer = self._waits.pop(wait)
                if message is None:
                    continue
                if not message.HasField("started"):
                    yield message
                self._wait_for(answer)  # only now: asking for more says that what came before has been taken

    async def _other(self, index: int) -> AsyncIterator[pb.StreamGenerateResponse]:
        while True:
            try:
                async for message in self._submit(index).messages():
                    yield message
                return
            except QueueFull as refusal:  # comes instead of everything else, never behind it
                pause_s = _RETRY_S if refusal.retry_after_s is None else min(refusal.retry_after_s, _RETRY_S)
                await asyncio.sleep(pause_s)

    def _wait_for(self, answer: AsyncIterator[pb.StreamGenerateResponse]) -> None:
        self._waits[asyncio.create_task(_next_message(answer))] = answer

    def close(self) -> None:
        """Stops waiting for messages. The streams behind the answers are their owner's to close."""
        for wait in self._waits:
            wait.cancel()
            if wait.done() and not wait.cancelled():
                wait.exception()  # of several errors one has been raised; the others count as seen


async def _next_message(answer: AsyncIterator[pb.StreamGenerateResponse]) -> pb.StreamGenerateResponse | None:
    return await anext(answer, None)
