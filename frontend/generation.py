"""The way of one request behind the public service: checked, admitted, tokenized, submitted, and cleaned up however it
ends.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from chairlift.v1 import generation_service_pb2 as pb
from frontend import convert, engine_convert
from frontend.admission import Admission
from frontend.answer import Answer
from frontend.answer_group import AnswerGroup
from frontend.deadline import Deadline
from frontend.engine_client import EngineClient
from frontend.errors import ClientStalled, DeadlineExceeded
from frontend.metrics.request_metrics import RequestMetrics
from frontend.metrics.request_watch import RequestWatch
from frontend.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt, nth_answer
from frontend.request_stream import CancelReason, RequestStream
from frontend.served_model import ServedModel

_CHARS_PER_TOKEN = 4
"""For the first guess at a prompt's tokens, corrected as soon as it is tokenized."""


class Generations:
    """Opens generations on the engine that is attached.

    Args:
        engine: the link.
        admission: the queue's bound.
        metrics: where requests are counted.
        token_window: tokens the engine may be ahead of a reader.
    """

    def __init__(
        self, engine: EngineClient, admission: Admission, metrics: RequestMetrics, *, token_window: int
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._token_window = token_window

    def model(self, name: str) -> ServedModel:
        """The model that is served.

        Raises:
            EngineUnavailable: none is.
            ModelNotFound: `name` is another one.
        """
        model = self._engine.attachment().model
        convert.check_model(name, model)
        return model

    @asynccontextmanager
    async def open(
        self,
        spec: pb.GenerationSpec,
        time_remaining_s: Callable[[], float | None],
        *,
        chat: ChatPrompt | None = None,
        default_max_tokens: int = convert.DEFAULT_MAX_TOKENS,
        streamed: bool = True,
    ) -> AsyncIterator[AnswerGroup]:
        """Starts a generation; leaving the context ends it, in the engine too, and gives its places back.

        Args:
            spec: as received.
            time_remaining_s: until the call's deadline; None if it has none.
            chat: the prompt, if it says more than the spec can; the spec then has none.
            default_max_tokens: length of an answer that the spec does not limit, as far as it fits.
            streamed: whether the client gets the messages as they come, and not only what they add up to.

        Raises:
            RequestError: any; nothing is left behind.
        """
        with RequestWatch(self._metrics, time_remaining_s, streamed=streamed) as watch:
            async with self._open(spec, chat, default_max_tokens, time_remaining_s, watch) as answers:
                yield answers

    @asynccontextmanager
    async def _open(
        self,
        spec: pb.GenerationSpec,
        chat: ChatPrompt | None,
        default_max_tokens: int,
        time_remaining_s: Callable[[], float | None],
        watch: RequestWatch,
    ) -> AsyncIterator[AnswerGroup]:
        deadline = Deadline(time_remaining_s)
        attachment = self._engine.attachment()
        model = attachment.model
        request = convert.generation_request(spec, model, chat)
        accepted_at_s = time.monotonic()
        watch.accept(model.name, attachment.engine, num_answers=request.num_answers, now_s=accepted_at_s)
        permits = self._admission.admit_group(request.num_answers, _guess_num_tokens(request.prompt), accepted_at_s)
        streams: list[RequestStream] = []
        answers: AnswerGroup | None = None
        reason = CancelReason.CLIENT
        try:
            prompt_ids = await tokenize(request.prompt, model, "spec.")
            max_tokens = convert.token_budget(request, len(prompt_ids), model, default_max_tokens)
            permits[0].correct(len(prompt_ids), time.monotonic())

            def submit(index: int) -> Answer:
                answer_request = nth_answer(request, index)
                submitted_at_s = time.monotonic()
                remaining_s = _checked_remaining_s(time_remaining_s())
                submission = engine_convert.submission(
                    answer_request, prompt_ids, max_tokens=max_tokens, remaining_s=remaining_s
                )
                stream = attachment.session.submit(submission, window=self._token_window)
                streams.append(stream)
                if not index:
                    watch.submit(max_tokens=max_tokens, now_s=submitted_at_s)
                    stream.on_account = watch.account
                stream.on_first_token = lambda: permits[index].release(time.monotonic(), served=True)
                return Answer(
                    answer_request,
                    model,
                    stream,
                    num_prompt_tokens=len(prompt_ids),
                    accepted_at_s=accepted_at_s,
                    submitted_at_s=submitted_at_s,
                    index=index,
                )

            answers = AnswerGroup(request.num_answers, submit, watch)
            yield answers
        except ClientStalled:
            reason = CancelReason.STALLED
            raise
        except asyncio.CancelledError:
            if deadline.passed():
                reason = CancelReason.DEADLINE
            raise
        finally:
            for permit in permits:
                permit.release(time.monotonic())
            if answers is not None:
                answers.close()
            for stream in streams:
                stream.close(reason)

    async def count_tokens(self, request: pb.CountTokensRequest, chat: ChatPrompt | None = None) -> list[int]:
        """The token ids of a prompt; takes a place in the queue while it is tokenized.

        Args:
            request: as received.
            chat: the prompt, if it says more than the request can; the request then has none.

        Raises:
            RequestError: any.
        """
        model = self.model(request.model)
        if chat is not None:
            convert.check_chat(chat, model, "chat.messages")
        prompt = chat or convert.prompt(request, model, "")
        permit = self._admission.admit(_guess_num_tokens(prompt), time.monotonic())
        try:
            return await tokenize(prompt, model, "")
        finally:
            permit.release(time.monotonic())


async def tokenize(prompt: Prompt, model: ServedModel, path: str) -> list[int]:
    """Token ids of a checked prompt.

    Args:
        path: of the message that holds the prompt, as in "spec.", for the errors.

    Raises:
        InvalidRequest: the model has no chat template, or the template refuses the messages.
    """
    match prompt:
        case TextPrompt(text):
            return await model.tokenizer.encode(text)
        case ChatPrompt(messages, options):
            return await model.tokenizer.encode_chat(messages, options, field=path + "chat")
        case TokenPrompt(token_ids):
            return list(token_ids)


def _guess_num_tokens(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt(text):
            return -(-len(text) // _CHARS_PER_TOKEN)
        case ChatPrompt():
            return -(-prompt.num_chars // _CHARS_PER_TOKEN)
        case TokenPrompt(token_ids):
            return len(token_ids)


def _checked_remaining_s(remaining_s: float | None) -> float | None:
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request reached the engine")
    return remaining_s
