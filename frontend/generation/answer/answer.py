"""One answer as messages of the public stream: Started, Chunks, exactly one Finished.

Tokens that are ready together are sent in one Chunk; if text follows a tool call among them, in several. With
log-probabilities each kind of part has a Chunk of its own, whose last token completes it. Unary calls collect the same
messages (`collect.py`); `group.py` joins several answers to one request.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from chairlift.service.end_reason import EndReason
from chairlift.v1 import generation_service_pb2 as pb
from frontend.generation.answer.answer_text import AnswerText, TextDelta
from frontend.generation.answer.parts import Parts, parts_by_token, parts_of
from frontend.generation.answer.prompt_echo import PromptEcho
from frontend.generation.answer.timing import timing
from frontend.generation.answer.token_logprobs import token_logprobs
from frontend.generation.turn_limiter import TurnLimiter
from frontend.request.request import GenerationRequest
from frontend.request.sampling import effective_sampling, effective_stop
from frontend.routing.stream import CancelReason, RequestEnd, RequestStream, TokenBatch
from frontend.slices import in_slices
from frontend.text.chat import AnswerParser, Delta, ReasoningText
from frontend.text.detokenizer import NO_MARKS
from frontend.text.served_model import ServedModel
from frontend.types import AnswerTimes


class Answer:
    """Converts the engine's tokens to messages.

    Args:
        request: the request with its final max_tokens.
        model: the served model.
        stream: the engine's tokens.
        prompt_ids: tokens of the prompt.
        times: measured before submission.
        index: index of the answer.
        prompt: echo of the prompt; None: not requested.
        parser: separates reasoning and tool calls; None: all is text.
        marks: special tokens that the parser needs.
        turn_limiter: limits the answers that resume at once; None: no limit.
    """

    def __init__(
        self,
        request: GenerationRequest,
        model: ServedModel,
        stream: RequestStream,
        *,
        prompt_ids: Sequence[int],
        times: AnswerTimes,
        index: int = 0,
        prompt: PromptEcho | None = None,
        parser: AnswerParser | None = None,
        marks: frozenset[int] = NO_MARKS,
        turn_limiter: TurnLimiter | None = None,
    ) -> None:
        self._turn_limiter = turn_limiter
        self._request = request
        self._model = model
        self._stream = stream
        self._num_prompt_tokens = len(prompt_ids)
        self._times = times
        self._index = index
        self._prompt = prompt
        self._parser = parser
        after = prompt_ids if request.continues_text else ()
        self._text = AnswerText(request, model.tokenizer, end_token_ids=model.end_token_ids, marks=marks, after=after)
        self._may_reason = parser is not None  # so far the answer is reasoning only
        self._num_reasoning_tokens = 0

    async def messages(self) -> AsyncIterator[pb.StreamGenerateResponse]:
        """Yields the messages; the first one comes with the first token.

        Raises:
            RequestError: the request failed.
        """
        started = False
        while True:
            batch = await self._stream.take()
            if self._turn_limiter is not None:
                await self._turn_limiter.wait_turn()
            if not started:
                started = True
                if self._prompt is not None:
                    await self._complete_prompt(self._prompt)
                message = self._started()
                if self._prompt is not None:
                    await asyncio.sleep(0)  # copying a million ids is slow, and so is what follows
                yield message
                if self._prompt is not None:
                    await asyncio.sleep(0)
                if self._request.prompt_only:
                    yield pb.StreamGenerateResponse(finished=self._finished(0, batch.end, None))
                    return
            delta, groups = self._take(batch)
            start = 0
            for end, parts in groups:
                if end > start or any(parts):
                    yield pb.StreamGenerateResponse(chunk=self._chunk(batch, start, end, parts))
                start = end
            if delta.stop_text is not None:
                self._stream.close(CancelReason.STOP_TEXT)
                num_tokens = batch.first_index + delta.num_tokens
                yield pb.StreamGenerateResponse(finished=self._finished(num_tokens, batch.end, delta.stop_text))
                return
            if batch.end is not None:
                num_tokens = batch.end.num_output_tokens
                yield pb.StreamGenerateResponse(finished=self._finished(num_tokens, batch.end, None))
                return

    def _take(self, batch: TokenBatch) -> tuple[TextDelta, list[tuple[int, Parts]]]:
        """Returns what a batch adds to the text, and to the parts of the answer in their order, each with the number of
        the batch's tokens up to its end.
        """
        if self._parser is None:
            delta = self._text.push(batch)
            return delta, [(delta.num_tokens, Parts(delta.text))]
        texts, num_tokens, stop_text = [], 0, None
        deltas: list[tuple[int, list[Delta]]] = []
        # Token by token during reasoning, so that usage does not depend on batching, and with log-probabilities.
        is_exact = self._may_reason or batch.logprobs is not None
        for piece in batch.one_by_one() if is_exact and batch.token_ids else (batch,):
            delta = self._text.push(piece)
            texts.append(delta.text)
            num_tokens += delta.num_tokens
            stop_text = delta.stop_text
            fed = self._feed(self._parser.feed(delta.text), num_tokens=piece.first_index + delta.num_tokens)
            deltas.append((num_tokens, fed))
            if stop_text is not None:
                break
        if batch.end is not None or stop_text is not None:
            fed = self._feed(self._parser.finish(), num_tokens=batch.first_index + num_tokens)
            deltas.append((num_tokens, fed))
        if batch.logprobs is not None:
            groups = [*parts_by_token(deltas), (num_tokens, Parts())]
        else:  # tokens are counted once
            *earlier, parts = parts_of([delta for _, fed in deltas for delta in fed])
            groups = [*((0, before) for before in earlier), (num_tokens, parts)]
        return TextDelta("".join(texts), num_tokens, stop_text), groups

    def _feed(self, deltas: list[Delta], *, num_tokens: int) -> list[Delta]:
        """Counts reasoning tokens.

        Args:
            num_tokens: tokens of the answer up to the end of `deltas`.
        """
        if self._may_reason and deltas:
            if isinstance(deltas[0], ReasoningText):
                self._num_reasoning_tokens = num_tokens
            self._may_reason = isinstance(deltas[-1], ReasoningText)
        return deltas

    def _chunk(self, batch: TokenBatch, start: int, end: int, parts: Parts) -> pb.Chunk:
        """Returns the chunk of the batch's tokens from `start` to `end`."""
        token_ids = batch.token_ids[start:end]
        logprobs = batch.logprobs.cut(start, end) if batch.logprobs else None
        chunk = pb.Chunk(
            first_token_index=batch.first_index + start,
            num_tokens=end - start,
            text=parts.text,
            token_ids=token_ids if self._request.output.token_ids else (),
            logprobs=token_logprobs(logprobs, token_ids, self._model.tokenizer) if logprobs else None,
            answer_index=self._index,
        )
        if self._parser is not None:
            chunk.reasoning = parts.reasoning
            chunk.tool_calls.extend(parts.tool_calls)
        return chunk

    async def _complete_prompt(self, prompt: PromptEcho) -> None:
        logprobs = self._stream.prompt_logprobs
        if logprobs is not None and not logprobs.num_missing:  # else the answer ended before its first token
            await in_slices(prompt.add_logprobs(logprobs))

    def _started(self) -> pb.StreamGenerateResponse:
        started = pb.Started(
            request_id=self._request.request_id,
            model=self._model.name,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._stream.num_cached_tokens,
            effective_sampling=effective_sampling(self._request),
            effective_stop=effective_stop(self._request),
        )
        response = pb.StreamGenerateResponse(started=started)
        if self._prompt is not None:  # may be large: copied once
            response.started.prompt.CopyFrom(self._prompt.message)
        return response

    def _finished(self, num_tokens: int, end: RequestEnd | None, stop_text: str | None) -> pb.Finished:
        usage = pb.Usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._stream.num_cached_tokens,
            num_output_tokens=num_tokens,
            num_reasoning_tokens=self._num_reasoning_tokens,
        )
        if stop_text is not None:
            reason = EndReason.STOP_TEXT
        elif end is None or self._request.prompt_only:
            reason = EndReason.MAX_TOKENS
        else:
            reason = end.reason
        finished = pb.Finished(
            reason=f"FINISH_REASON_{reason.name}",
            usage=usage,
            timing=self._timing(),
            answer_index=self._index,
            seed=self._request.sampling.seed,
        )
        if stop_text is not None:
            finished.stop_text = stop_text
        elif end is not None and reason is EndReason.STOP_TOKEN:
            finished.stop_token_id = end.stop_token_id
        return finished

    def _timing(self) -> pb.Timing:
        """An answer ended by a stop text does not wait for the engine's final account: the latest report has all phases
        but decoding, which is the remainder.
        """
        clock, now_s = self._stream.clock, time.monotonic()
        return timing(
            self._times,
            clock.engine_time(now_s),
            first_token_at_s=clock.first_token_at_s,
            client_wait_s=clock.client_wait_s(now_s),
            now_s=now_s,
        )
