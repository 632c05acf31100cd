"""The endpoints of the Responses API."""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.call_runner import CallRunner, name_call
from frontend.api.http.endpoint import STREAMED, Api, Endpoint
from frontend.api.http.errors import RESPONSES_PARAMS, BodyError, error_response
from frontend.api.http.output_constraint import chat_constraint
from frontend.api.openai.responses.bodies import ConversationBody, ResponsesBody
from frontend.api.openai.responses.response import ResponseObjectBuilder
from frontend.slices import in_slices


class Responses:
    """Handles the endpoints.

    Args:
        runner: runs the calls.
    """

    def __init__(self, runner: CallRunner) -> None:
        self._runner = runner

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        arrived_at_s = time.monotonic()
        name_call(request, "resp_")
        body = await self._runner.read(request, ResponsesBody)
        request_id = name_call(request, "resp_", body.request_id).removeprefix("resp_")
        chat = await in_slices(body.chat())
        generations = self._runner.generations
        model = generations.model(body.model)
        constraint = chat_constraint(
            body.output_constraint(), body.tool_use, generations.chat_format(model), model.tokenizer
        )
        builder = ResponseObjectBuilder(body, model, request_id, chat=chat, constraint=constraint)
        deadline = self._runner.deadline(request, body, arrived_at_s)
        return await self._runner.respond_single(request, builder, deadline, stream=bool(body.stream))

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/responses/input_tokens: counts the tokens of a request's prompt."""
        name_call(request, "resp_")
        body = await self._runner.read(request, ConversationBody)
        chat = await in_slices(body.chat())
        with self._runner.calls.call():
            token_ids = await self._runner.generations.count_tokens(pb.CountTokensRequest(model=body.model), chat)
        content = {"object": "response.input_tokens", "input_tokens": len(token_ids)}
        return JSONResponse(content, headers=request.state.answer_headers)

    async def stored(self, request: Request) -> Response:
        """Refuses all paths below /v1/responses/ID."""
        response_id = request.path_params["response_id"]
        raise BodyError(
            404,
            f"there is no response {response_id[:128]!r}: this server stores no responses",
            param="response_id",
            code="response_not_found",
        )


def responses_api(responses: Responses) -> Api:
    """Returns the Responses API."""
    path, stored = "/v1/responses", "/v1/responses/{response_id}"
    count = "Count the tokens of a request"
    refused = [
        Endpoint(method, path, responses.stored, "Refuse to look for a stored response", is_described=False)
        for method, path in (
            ("GET", stored),
            ("DELETE", stored),
            ("POST", f"{stored}/cancel"),
            ("GET", f"{stored}/input_items"),
        )
    ]
    return Api(
        path,
        [
            Endpoint("POST", path, responses.create, "Create a response", ResponsesBody, STREAMED),
            Endpoint("POST", f"{path}/input_tokens", responses.input_tokens, count, ConversationBody),
            *refused,
        ],
        _error,
    )


def _error(error: Exception, scope: Scope) -> Response:
    return error_response(error, RESPONSES_PARAMS, scope=scope)
