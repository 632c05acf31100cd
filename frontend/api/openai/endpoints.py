"""Endpoints of completions and chat completions."""

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from frontend.api.http.call_runner import CallRunner, name_call
from frontend.api.http.endpoint import STREAMED, Api, Endpoint
from frontend.api.http.errors import CHAT_PARAMS, error_response
from frontend.api.http.output_constraint import chat_constraint
from frontend.api.openai.chat_bodies import ChatBody
from frontend.api.openai.chat_response import ChatBuilder
from frontend.api.openai.completion_bodies import CompletionBody
from frontend.api.openai.completion_response import CompletionBuilder
from frontend.api.openai.generation_spec import completion_specs
from frontend.api.openai.info_routes import InfoRoutes
from frontend.api.openai.lora_routes import LoraRoutes
from frontend.slices import in_slices


class CompletionsHandler:
    """Handles completions and chat completions.

    Args:
        runner: runs the calls.
    """

    def __init__(self, runner: CallRunner) -> None:
        self._runner = runner

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        arrived_at_s = time.monotonic()
        name_call(request, "cmpl-")
        body = await self._runner.read(request, CompletionBody)
        request_id = name_call(request, "cmpl-", body.request_id)
        model = self._runner.generations.model(body.model)
        specs = await in_slices(completion_specs(body, request_id))
        builder = CompletionBuilder(body, specs, model, request_id)
        deadline = self._runner.deadline(request, body, arrived_at_s)
        return await self._runner.respond(request, builder, deadline, stream=bool(body.stream))

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived_at_s = time.monotonic()
        name_call(request, "chatcmpl-")
        body = await self._runner.read(request, ChatBody)
        request_id = name_call(request, "chatcmpl-", body.request_id)
        generations = self._runner.generations
        model = generations.model(body.model)
        chat = await in_slices(body.prompt_of(body.messages))
        constraint = chat_constraint(
            body.output_constraint(), body.tool_use, generations.chat_format(model), model.tokenizer
        )
        builder = ChatBuilder(body, model, request_id, chat=chat, constraint=constraint)
        deadline = self._runner.deadline(request, body, arrived_at_s)
        return await self._runner.respond(request, builder, deadline, stream=bool(body.stream))


def openai_apis(
    handler: CompletionsHandler, info_routes: InfoRoutes, lora_routes: LoraRoutes | None
) -> tuple[Api, Api]:
    """Returns two APIs: chat completions, whose errors name chat parameters, and all other paths."""
    others = [*info_routes.endpoints(), *(lora_routes.endpoints() if lora_routes is not None else ())]
    chat = Endpoint(
        "POST", "/v1/chat/completions", handler.chat_completions, "Answer a conversation", ChatBody, STREAMED
    )
    completions = Endpoint("POST", "/v1/completions", handler.completions, "Complete prompts", CompletionBody, STREAMED)
    return Api("/v1/chat", [chat], _chat_error), Api("", [completions, *others], _error)


def _error(error: Exception, scope: Scope) -> Response:
    return error_response(error, scope=scope)


def _chat_error(error: Exception, scope: Scope) -> Response:
    return error_response(error, CHAT_PARAMS, scope=scope)
