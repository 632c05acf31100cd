"""The generating endpoints: a body in, an answer or a stream out."""

import uuid

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from frontend.calls import ActiveCalls
from frontend.chat import chat_format as make_chat_format
from frontend.convert import MAX_ID_CHARS, check_chat
from frontend.generation import Generations
from frontend.openai.bodies import CompletionBody, GenerationBody
from frontend.openai.chat import Chat
from frontend.openai.chat_bodies import ChatBody
from frontend.openai.completions import Completion
from frontend.openai.disconnect import cancelled_on_disconnect
from frontend.openai.error_object import BodyError
from frontend.openai.event_stream import EventStream
from frontend.openai.incoming import read_body
from frontend.openai.job import Job
from frontend.openai.play import play_whole

_MOST_ID_CHARS = MAX_ID_CHARS - len("chatcmpl-") - len("-63")
_TAIL_CHARS = 200  # of a prompt: more than any mark


class Door:
    """Generation over HTTP.

    Args:
        generations: does the work.
        calls: counts it.
        tool_call_parser, reasoning_parser: names of the formats of chat answers.
        stall_timeout_s: how long a body may take to arrive, and an event to be read.
    """

    def __init__(
        self,
        generations: Generations,
        calls: ActiveCalls,
        *,
        tool_call_parser: str,
        reasoning_parser: str,
        stall_timeout_s: float,
    ) -> None:
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        self._generations = generations
        self._calls = calls
        self._stall_timeout_s = stall_timeout_s

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await read_body(request, CompletionBody, timeout_s=self._stall_timeout_s)
        model = self._generations.model(body.model)
        job = Completion(body, model, "cmpl-" + _request_id(body, request))
        return await self._answer(request, job, stream=bool(body.stream))

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await read_body(request, ChatBody, timeout_s=self._stall_timeout_s)
        model = self._generations.model(body.model)
        chat = body.prompt_of(body.messages)
        check_chat(chat, model, "spec.chat.messages")
        source = model.tokenizer.chat_template_source
        chat_format = make_chat_format(source, tools=self._tool_call_parser, reasoning=self._reasoning_parser)
        prompt = ""
        if chat_format.reasoning != "none":  # whether the prompt opens it
            prompt = await model.tokenizer.render_chat(chat.messages, chat.options, field="spec.chat")
        request_id = "chatcmpl-" + _request_id(body, request)
        job = Chat(body, model, request_id, chat=chat, chat_format=chat_format, prompt_tail=prompt[-_TAIL_CHARS:])
        return await self._answer(request, job, stream=bool(body.stream))

    async def _answer(self, request: Request, job: Job, *, stream: bool) -> Response:
        if stream:
            return EventStream(job, self._generations, self._calls, stall_timeout_s=self._stall_timeout_s)
        with self._calls.call():
            async with cancelled_on_disconnect(request.receive):
                responses = await play_whole(self._generations, job)
        return JSONResponse(job.whole(responses), headers={"x-request-id": job.request_id})


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
