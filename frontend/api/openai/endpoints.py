"""The completion endpoints: a body in, an answer or a stream out."""

import time

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.http.bodies import CompletionBody
from frontend.api.http.call_runner import JobRunner, request_id_of
from frontend.api.http.generation_spec import completion_specs
from frontend.api.http.output_format import answer_form, chat_form
from frontend.api.openai.chat_bodies import ChatBody
from frontend.api.openai.chat_response import Chat
from frontend.api.openai.completion_response import Completion
from frontend.slices import in_slices


class Door:
    """Completions and chat completions.

    Args:
        runner: runs the calls.
    """

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        arrived_at_s = time.monotonic()
        body = await self._runner.read(request, CompletionBody)
        model = self._runner.generations.model(body.model)
        request_id = "cmpl-" + request_id_of(body.request_id, request.headers)
        specs = await in_slices(completion_specs(body, request_id))
        job = Completion(body, specs, model, request_id)
        deadline = self._runner.deadline(request, body, arrived_at_s)
        return await self._runner.respond(request, job, deadline, stream=bool(body.stream))

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived_at_s = time.monotonic()
        body = await self._runner.read(request, ChatBody)
        generations = self._runner.generations
        model = generations.model(body.model)
        chat = await in_slices(body.prompt_of(body.messages))
        form = chat_form(answer_form(body), body.tool_use, generations.chat_format(model), model.tokenizer)
        request_id = "chatcmpl-" + request_id_of(body.request_id, request.headers)
        job = Chat(body, model, request_id, chat=chat, form=form)
        deadline = self._runner.deadline(request, body, arrived_at_s)
        return await self._runner.respond(request, job, deadline, stream=bool(body.stream))
