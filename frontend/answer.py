"""One answer as the messages of the public stream: Started, Chunks, exactly one Finished.

Whatever tokens are there when the sender comes for more go out as one Chunk. Unary calls fold the same messages with
`whole_answer`. Several answers to one request are `answer_group.py`'s.
"""

import time
from collections.abc import AsyncIterator, Sequence

from google.protobuf.duration_pb2 import Duration

from chairlift.v1 import generation_service_pb2 as pb
from frontend.answer_text import AnswerText
from frontend.request import GenerationRequest, SamplingOptions
from frontend.request_stream import CancelReason, EndReason, LogprobBatch, RequestEnd, RequestStream
from frontend.served_model import ServedModel
from frontend.tokenizer import Tokenizer

_FINISH_REASONS = {
    EndReason.END_TOKEN: pb.FINISH_REASON_END_TOKEN,
    EndReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    EndReason.MAX_TOKENS: pb.FINISH_REASON_MAX_TOKENS,
    EndReason.CONTEXT_FULL: pb.FINISH_REASON_CONTEXT_FULL,
}


class Answer:
    """Turns the engine's tokens into messages.

    Args:
        request: what was asked.
        model: what answers.
        stream: its tokens.
        num_prompt_tokens: tokens of the prompt.
        accepted_at_s, submitted_at_s: time.monotonic() when the request got its place and when it went to the engine.
        index: which of the request's answers this is.
    """

    def __init__(
        self,
        request: GenerationRequest,
        model: ServedModel,
        stream: RequestStream,
        *,
        num_prompt_tokens: int,
        accepted_at_s: float,
        submitted_at_s: float,
        index: int = 0,
    ) -> None:
        self._request = request
        self._model = model
        self._stream = stream
        self._num_prompt_tokens = num_prompt_tokens
        self._accepted_at_s = accepted_at_s
        self._submitted_at_s = submitted_at_s
        self._index = index
        self._text = AnswerText(request, model.tokenizer)

    async def messages(self) -> AsyncIterator[pb.StreamGenerateResponse]:
        """The stream's messages; the first comes with the first token, not before.

        Raises:
            RequestError: the request failed.
        """
        output, tokenizer = self._request.output, self._model.tokenizer
        started = False
        while True:
            batch = await self._stream.take()
            if not started:
                started = True
                yield pb.StreamGenerateResponse(started=self._started())
            delta = self._text.push(batch)
            if delta.num_tokens or delta.text:
                token_ids = batch.token_ids[: delta.num_tokens]
                logprobs = batch.logprobs.first(delta.num_tokens) if batch.logprobs else None
                yield pb.StreamGenerateResponse(
                    chunk=pb.Chunk(
                        first_token_index=batch.first_index,
                        num_tokens=delta.num_tokens,
                        text=delta.text,
                        token_ids=token_ids if output.token_ids else (),
                        logprobs=_logprobs(logprobs, token_ids, tokenizer) if logprobs else None,
                        answer_index=self._index,
                    )
                )
            if delta.stop_text is not None:
                self._stream.close(CancelReason.STOP_TEXT)
                num_tokens = batch.first_index + delta.num_tokens
                yield pb.StreamGenerateResponse(finished=self._finished(num_tokens, batch.end, delta.stop_text))
                return
            if batch.end is not None:
                num_tokens = batch.end.num_output_tokens
                yield pb.StreamGenerateResponse(finished=self._finished(num_tokens, batch.end, None))
                return

    def _started(self) -> pb.Started:
        return pb.Started(
            request_id=self._request.request_id,
            model=self._model.name,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._stream.num_cached_tokens,
            effective_sampling=effective_sampling(self._request.sampling),
        )

    def _finished(self, num_tokens: int, end: RequestEnd | None, stop_text: str | None) -> pb.Finished:
        usage = pb.Usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._stream.num_cached_tokens,
            num_output_tokens=num_tokens,
        )
        finished = pb.Finished(
            usage=usage, timing=self._timing(end), answer_index=self._index, seed=self._request.sampling.seed
        )
        if stop_text is not None:
            finished.reason = pb.FINISH_REASON_STOP_TEXT
            finished.stop_text = stop_text
        elif end is not None:
            finished.reason = _FINISH_REASONS[end.reason]
            if end.reason is EndReason.STOP_TOKEN:
                finished.stop_token_id = end.stop_token_id
        return finished

    def _timing(self, end: RequestEnd | None) -> pb.Timing:
        """Times as far as known: an answer that a stop text ends does not wait for the engine's account of it."""
        timing = pb.Timing(total=_duration(time.monotonic() - self._accepted_at_s))
        if self._stream.first_token_at_s is not None:
            timing.first_token.CopyFrom(_duration(self._stream.first_token_at_s - self._accepted_at_s))
        if end is not None:
            timing.queued.CopyFrom(_duration(self._submitted_at_s - self._accepted_at_s + end.queued_s))
            timing.prefill.CopyFrom(_duration(end.prefill_s))
            timing.num_preemptions = end.num_preemptions
        return timing


async def whole_answer(messages: AsyncIterator[pb.StreamGenerateResponse]) -> pb.GenerateResponse:
    """Folds the messages of a stream into the response of a unary call."""
    response = pb.GenerateResponse()
    texts: dict[int, list[str]] = {}  # by answer
    async for message in messages:
        match message.WhichOneof("event"):
            case "started":
                started = message.started
                response.request_id, response.model = started.request_id, started.model
                response.effective_sampling.CopyFrom(started.effective_sampling)
            case "chunk":
                chunk = message.chunk
                answer = _nth_answer(response, chunk.answer_index)
                texts.setdefault(chunk.answer_index, []).append(chunk.text)
                answer.token_ids.extend(chunk.token_ids)
                if chunk.HasField("logprobs"):
                    answer.logprobs.MergeFrom(chunk.logprobs)  # appends to the columns
                    answer.logprobs.top_width = chunk.logprobs.top_width
            case "finished":
                _nth_answer(response, message.finished.answer_index).finished.CopyFrom(message.finished)
    for index, parts in texts.items():
        _nth_answer(response, index).text = "".join(parts)
    return response


def _nth_answer(response: pb.GenerateResponse, index: int) -> pb.GenerateResponse | pb.Answer:
    """Where answer `index` stands in the response; made if it is not there yet."""
    while len(response.other_answers) < index:
        response.other_answers.add()
    return response.other_answers[index - 1] if index else response


def effective_sampling(sampling: SamplingOptions) -> pb.SamplingOptions:
    """The sampling values in force, every one set."""
    return pb.SamplingOptions(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias),
    )


def _logprobs(batch: LogprobBatch, token_ids: Sequence[int], tokenizer: Tokenizer) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=batch.chosen,
        top_width=batch.top_width,
        top_ids=batch.top_ids,
        top_values=batch.top_values,
        chosen_bytes=[tokenizer.token_bytes(token_id) for token_id in token_ids],
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(int(seconds * 1e9), 0))
    return duration
