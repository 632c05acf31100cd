"""The generating endpoints: a body in, an answer or a stream out."""

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from frontend.call_deadline import CallDeadline
from frontend.calls import ActiveCalls
from frontend.generation import Generations
from frontend.openai.bodies import CompletionBody, GenerationBody
from frontend.openai.call_deadline import call_deadline
from frontend.openai.chat import Chat
from frontend.openai.chat_bodies import ChatBody
from frontend.openai.completions import Completion
from frontend.openai.disconnect import cancelled_on_disconnect
from frontend.openai.error_object import BodyError
from frontend.openai.event_stream import EventStream
from frontend.openai.forms import chat_form
from frontend.openai.incoming import read_body
from frontend.openai.job import Job
from frontend.openai.play import play_whole
from frontend.openai.rendering import rendered
from frontend.request.convert import MAX_ID_CHARS

_MOST_ID_CHARS = MAX_ID_CHARS - len("chatcmpl-") - len("-63")


class Door:
    """Generation over HTTP.

    Args:
        generations: does the work.
        calls: counts it.
        stall_timeout_s: how long a body may take to arrive, and an event to be read.
        default_timeout_s: how long a call without a deadline may take; 0: for ever.
    """

    def __init__(
        self, generations: Generations, calls: ActiveCalls, *, stall_timeout_s: float, default_timeout_s: float
    ) -> None:
        self._generations = generations
        self._calls = calls
        self._stall_timeout_s = stall_timeout_s
        self._default_timeout_s = default_timeout_s

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        arrived_at_s = time.monotonic()
        body = await read_body(request, CompletionBody, timeout_s=self._stall_timeout_s)
        model = self._generations.model(body.model)
        job = Completion(body, model, "cmpl-" + _request_id(body, request))
        deadline = self._deadline(request, body, arrived_at_s)
        return await self._answer(request, job, deadline, stream=bool(body.stream))

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived_at_s = time.monotonic()
        body = await read_body(request, ChatBody, timeout_s=self._stall_timeout_s)
        model = self._generations.model(body.model)
        chat = body.prompt_of(body.messages)
        form = chat_form(body, self._generations.chat_format(model), model.tokenizer)
        job = Chat(body, model, "chatcmpl-" + _request_id(body, request), chat=chat, form=form)
        deadline = self._deadline(request, body, arrived_at_s)
        return await self._answer(request, job, deadline, stream=bool(body.stream))

    def _deadline(self, request: Request, body: GenerationBody, arrived_at_s: float) -> CallDeadline:
        default_s = self._default_timeout_s if body.time_budget is None else 0.0  # a budget is bound enough
        return call_deadline(request.headers, body.timeout, arrived_at_s=arrived_at_s, default_s=default_s)

    async def _answer(self, request: Request, job: Job, deadline: CallDeadline, *, stream: bool) -> Response:
        if stream:
            return EventStream(job, self._generations, self._calls, deadline, stall_timeout_s=self._stall_timeout_s)
        with self._calls.call():
            async with cancelled_on_disconnect(request.receive):
                responses = await play_whole(self._generations, job, deadline)
                body = await rendered(job, responses)
        return Response(body, headers={"x-request-id": job.request_id}, media_type="application/json")


def _request_id(body: GenerationBody, request: Request) -> str:
    """The client's id for tracing, from the body or the header, or one of ours.

    Raises:
        BodyError: it is too long, or no header could carry it.
    """
    request_id = body.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex
    if len(request_id) > _MOST_ID_CHARS or not (request_id.isascii() and request_id.isprintable()):
        raise BodyError(
            400, f"request_id must have at most {_MOST_ID_CHARS} printable ASCII characters", param="request_id"
        )
    return request_id
