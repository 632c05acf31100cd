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
from frontend.engine_client import EngineClient
from frontend.errors import ClientStalled, DeadlineExceeded
from frontend.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from frontend.request_stream import CancelReason, RequestStream
from frontend.served_model import ServedModel

_CHARS_PER_TOKEN = 4
"""For the first guess at a prompt's tokens, corrected as soon as it is tokenized."""


class Generations:
    """Opens generations on the engine that is attached.

    Args:
        engine: the link.
        admission: the queue's bound.
        token_window: tokens the engine may be ahead of a reader.
    """

    def __init__(self, engine: EngineClient, admission: Admission, *, token_window: int) -> None:
        self._engine = engine
        self._admission = admission
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
        self, spec: pb.GenerationSpec, time_remaining_s: Callable[[], float | None]
    ) -> AsyncIterator[Answer]:
        """Starts a generation; leaving the context ends it, in the engine too, and gives its place back.

        Args:
            spec: as received.
            time_remaining_s: until the call's deadline; None if it has none.

        Raises:
            RequestError: any; nothing is left behind.
        """
        attachment = self._engine.attachment()
        model = attachment.model
        request = convert.generation_request(spec, model)
        accepted_at_s = time.monotonic()
        permit = self._admission.admit(_guess_num_tokens(request.prompt), accepted_at_s)
        stream: RequestStream | None = None
        reason = CancelReason.CLIENT
        try:
            prompt_ids = await tokenize(request.prompt, model, "spec.")
            max_tokens = convert.token_budget(request, len(prompt_ids), model)
            submitted_at_s = time.monotonic()
            permit.correct(len(prompt_ids), submitted_at_s)
            remaining_s = _checked_remaining_s(time_remaining_s())
            submission = engine_convert.submission(request, prompt_ids, max_tokens=max_tokens, remaining_s=remaining_s)
            stream = attachment.session.submit(submission, window=self._token_window)
            stream.on_first_token = lambda: permit.release(time.monotonic(), served=True)
            yield Answer(
                request,
                model,
                stream,
                num_prompt_tokens=len(prompt_ids),
                accepted_at_s=accepted_at_s,
                submitted_at_s=submitted_at_s,
            )
        except ClientStalled:
            reason = CancelReason.STALLED
            raise
        except asyncio.CancelledError:
            remaining_s = time_remaining_s()
            if remaining_s is not None and remaining_s <= 0:
                reason = CancelReason.DEADLINE
            raise
        finally:
            permit.release(time.monotonic())
            if stream is not None:
                stream.close(reason)

    async def count_tokens(self, request: pb.CountTokensRequest) -> list[int]:
        """The token ids of a prompt; takes a place in the queue while it is tokenized.

        Raises:
            RequestError: any.
        """
        model = self.model(request.model)
        prompt = convert.prompt(request, model, "")
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
        case ChatPrompt(messages):
            return await model.tokenizer.encode_chat(messages, field=path + "chat")
        case TokenPrompt(token_ids):
            return list(token_ids)


def _guess_num_tokens(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt(text):
            return -(-len(text) // _CHARS_PER_TOKEN)
        case ChatPrompt(messages):
            return -(-sum(len(turn.content) for turn in messages) // _CHARS_PER_TOKEN)
        case TokenPrompt(token_ids):
            return len(token_ids)


def _checked_remaining_s(remaining_s: float | None) -> float | None:
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request reached the engine")
    return remaining_s
