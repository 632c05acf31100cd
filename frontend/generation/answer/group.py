"""Several answers to one request as the messages of one public stream.

The first answer computes the prompt. The others are submitted when its first token has arrived, so that they find the
prompt's blocks in the engine's prefix cache. If the engine's queue is full, an answer is submitted again, because the
request has been accepted and its first answer runs. Any other error of one answer ends the group.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import QueueFull
from frontend.generation.answer.answer import Answer
from frontend.observability.request_watch import RequestWatch

_RETRY_S = 0.25
"""Maximum pause before an answer is submitted again."""


class AnswerGroup:
    """The answers to one request. Close it after the last message has been read, or to stop reading.

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
        """Yields Started, then the Chunks of all answers as they arrive, and one Finished for each.

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
            await asyncio.sleep(0)  # one per iteration of the loop: each copies the prompt
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
                self._wait_for(answer)  # only now: this tells the answer that its message was sent

    async def _other(self, index: int) -> AsyncIterator[pb.StreamGenerateResponse]:
        while True:
            try:
                async for message in self._submit(index).messages():
                    yield message
                return
            except QueueFull as refusal:  # always before the first message
                pause_s = _RETRY_S if refusal.retry_after_s is None else min(refusal.retry_after_s, _RETRY_S)
                await asyncio.sleep(pause_s)

    def _wait_for(self, answer: AsyncIterator[pb.StreamGenerateResponse]) -> None:
        self._waits[asyncio.create_task(_next_message(answer))] = answer

    def close(self) -> None:
        """Stops waiting for messages. The caller closes the streams of the answers."""
        for wait in self._waits:
            wait.cancel()
            if wait.done() and not wait.cancelled():
                wait.exception()  # one error has been raised; marks the others as retrieved


async def _next_message(answer: AsyncIterator[pb.StreamGenerateResponse]) -> pb.StreamGenerateResponse | None:
    return await anext(answer, None)
