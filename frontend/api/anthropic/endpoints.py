"""The endpoints of the Messages API."""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.anthropic.bodies import MessagesBody, PromptBody
from frontend.api.anthropic.errors import REQUEST_ID_HEADER, error_response
from frontend.api.anthropic.message_response import MessageBuilder
from frontend.api.http.call_runner import CallRunner, name_call
from frontend.api.http.endpoint import STREAMED, Api, Endpoint
from frontend.api.http.output_constraint import chat_constraint
from frontend.slices import in_slices


class Messages:
    """Handles the endpoints.

    Args:
        runner: runs the calls.
    """

    def __init__(self, runner: CallRunner) -> None:
        self._runner = runner

    async def create(self, request: Request) -> Response:
        """POST /v1/messages."""
        arrived_at_s = time.monotonic()
        name_call(request, "req_")
        body = await self._runner.read(request, MessagesBody)
        call_id = name_call(request, "req_", body.request_id)
        chat = await in_slices(body.chat())
        generations = self._runner.generations
        model = generations.model(body.model)
        constraint = chat_constraint(
            body.output_constraint(), body.tool_use, generations.chat_format(model), model.tokenizer
        )
        builder = MessageBuilder(body, model, call_id.removeprefix("req_"), chat=chat, constraint=constraint)
        deadline = self._runner.deadline(request, body, arrived_at_s)
        response = await self._runner.respond_single(request, builder, deadline, stream=bool(body.stream))
        response.headers[REQUEST_ID_HEADER] = call_id
        return response

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        call_id = name_call(request, "req_")
        body = await self._runner.read(request, PromptBody)
        chat = await in_slices(body.chat())
        with self._runner.calls.call():
            token_ids = await self._runner.generations.count_tokens(pb.CountTokensRequest(model=body.model), chat)
        headers = {**request.state.answer_headers, REQUEST_ID_HEADER: call_id}
        return JSONResponse({"input_tokens": len(token_ids)}, headers=headers)


def messages_api(messages: Messages) -> Api:
    """Returns the Messages API."""
    path, error = "/v1/messages", "AnthropicError"
    answer, count = "Answer a conversation in Anthropic's format", "Count the tokens of a conversation"
    return Api(
        path,
        [
            Endpoint("POST", path, messages.create, answer, MessagesBody, STREAMED, error=error),
            Endpoint("POST", f"{path}/count_tokens", messages.count_tokens, count, PromptBody, error=error),
        ],
        error_response,
    )
