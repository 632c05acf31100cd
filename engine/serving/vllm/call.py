"""One Generate call: submits its answers, and yields their responses as they come.

The first answer computes the prompt. The others are submitted when its first token has come, so that they find the
prompt in the prefix cache; if the engine's queue is full then, they are submitted again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np

from engine.serving.vllm.answer import Answer
from engine.serving.vllm.convert import WantedAnswers
from engine.serving.vllm.local_session import LocalSession
from engine.serving.vllm.messages import chunk_response, complete_response
from engine.serving.vllm.stop_texts import StopTextMatcher

TOKEN_WINDOW = 256
"""Tokens that a stream may be ahead of its reader; then its answers pause, and keep their cache."""
_RETRY_S = 0.25


class Call:
    """A call between its check and its end.

    Args:
        wanted: what is asked.
        session: where the answers are submitted.
        grammar: of the constraint, compiled to llguidance's format; empty: none.
        bytes_of: spells a token, for stop texts.
        end_s: monotonic seconds of its deadline; None: it has none.
    """

    def __init__(
        self,
        wanted: WantedAnswers,
        session: LocalSession,
        grammar: str,
        bytes_of: Callable[[int], bytes],
        end_s: float | None,
    ) -> None:
        self._wanted = wanted
        self._session = session
        self._grammar = grammar
        self._end_s = end_s
        self._prompt_ids: list[int] = np.frombuffer(wanted.template.prompt_ids, dtype="<u4").tolist()
        self._news = asyncio.Event()
        stops, min_tokens = wanted.stop_texts, wanted.template.stops.min_tokens
        field = wanted.constraint.field if wanted.constraint is not None else ""
        self._answers = [
            Answer(index, StopTextMatcher(stops, bytes_of) if stops else None, min_tokens, field)
            for index in range(wanted.num_answers)
        ]
        self._num_ungranted = [0] * wanted.num_answers  # tokens sent and not granted again

    async def responses(self) -> AsyncIterator[Any]:
        """Yields the responses; the next one is asked for when one has been sent.

        Raises: CallRefused: an answer failed; says with which status the call ends.
        """
        first, *others = self._answers
        await self._submit(first)
        has_ended: set[int] = set()
        while len(has_ended) < len(self._answers):
            await self._news.wait()
            self._news.clear()
            for answer in self._answers:
                self._check(answer)
            if first.token_ids or not first.is_open:
                for answer in others:
                    await self._submit(answer)
            if not self._wanted.is_streamed and any(answer.end is None for answer in self._answers):
                continue
            for answer in self._answers:
                if answer.index in has_ended:
                    continue
                if answer.end is not None:
                    has_ended.add(answer.index)
                async for response in self._next_responses(answer):
                    yield response

    def abort(self) -> None:
        """Stops the answers; the call ends with what they have."""
        for answer in self._answers:
            answer.abort()
            self._session.cancel(answer)
        self._news.set()

    def close(self) -> None:
        """Stops what still runs, after the call has ended."""
        for answer in self._answers:
            self._session.forget(answer)

    async def _next_responses(self, answer: Answer) -> AsyncIterator[Any]:
        has_ended = answer.end is not None
        if self._wanted.is_streamed and answer.has_unsent_tokens:
            unsent = answer.take()
            yield chunk_response(answer, unsent, self._prompt_ids)
            self._grant(answer, len(unsent.token_ids))
        if has_ended:
            yield complete_response(answer, answer.take(), self._prompt_ids)

    def _check(self, answer: Answer) -> None:
        failure = answer.failure
        if failure is None:
            return
        if answer.index == 0 or failure.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise failure
        answer.reset()  # the queue is full, but the call has been accepted
        asyncio.get_running_loop().call_later(_RETRY_S, self._retry, answer)

    def _retry(self, answer: Answer) -> None:
        answer.is_due = True
        self._news.set()

    async def _submit(self, answer: Answer) -> None:
        if not (answer.is_due and answer.is_open):
            return
        answer.is_due = False
        submission = self._wanted.submission(answer.index)
        submission.grammar = self._grammar
        if self._wanted.is_streamed:
            submission.token_credit = TOKEN_WINDOW
        if self._end_s is not None:
            remaining_ms = round((self._end_s - time.monotonic()) * 1e3)
            submission.remaining_ms = min(max(remaining_ms, 0), 2**32 - 1)  # a deadline may be years away
        await self._session.submit(answer, submission, self._news.set)

    def _grant(self, answer: Answer, num_tokens: int) -> None:
        self._num_ungranted[answer.index] += num_tokens
        if self._num_ungranted[answer.index] >= TOKEN_WINDOW // 2:
            self._session.grant(answer, self._num_ungranted[answer.index])
            self._num_ungranted[answer.index] = 0
