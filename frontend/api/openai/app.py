"""The endpoints, and the one place where what goes wrong becomes a response."""

import asyncio
import functools
import json
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from frontend.access.api_keys import ApiKeys
from frontend.api.http.api import Api, ErrorForms
from frontend.api.http.api_key_middleware import KeyGate
from frontend.api.http.bodies import CompletionBody, DetokenizeBody
from frontend.api.http.disconnect import ClientGone
from frontend.api.http.endpoint import STREAMED, Endpoint
from frontend.api.http.errors import CHAT_PARAMS, BodyError, error_response
from frontend.api.http.openapi import openapi_document
from frontend.api.openai.chat_bodies import ChatBody, TokenizeBody
from frontend.api.openai.endpoints import Door
from frontend.api.openai.info_routes import Facts
from frontend.errors import RequestError

_CLIENT_CLOSED_REQUEST = 499


def make_app(door: Door, facts: Facts, keys: ApiKeys, apis: Sequence[Api] = ()) -> Starlette:
    """The ASGI application.

    Args:
        door: completions and chat completions.
        facts: what can be asked without generating.
        keys: open the server.
        apis: further ones.
    """
    chat_path = "/v1/chat/completions"
    chat = Endpoint("POST", chat_path, door.chat_completions, "Answer a conversation", ChatBody, STREAMED)
    apis = [Api("/v1/chat", [chat], _chat_error), *apis]
    forms = ErrorForms(apis, _openai_error)
    endpoints = [
        Endpoint("POST", "/v1/completions", door.completions, "Complete prompts", CompletionBody, STREAMED),
        *(endpoint for api in apis for endpoint in api.endpoints),
        Endpoint("GET", "/v1/models", facts.models, "List the models"),
        Endpoint("GET", "/v1/models/", facts.models, "List the models", is_described=False),
        Endpoint("GET", "/v1/models/{model:path}", facts.model, "Describe a model"),
        Endpoint("POST", "/tokenize", facts.tokenize, "Turn text or messages into token ids", TokenizeBody),
        Endpoint("POST", "/detokenize", facts.detokenize, "Turn token ids into text", DetokenizeBody),
        Endpoint("GET", "/health", facts.health, "Tell whether requests are taken", answers=(), is_open=True),
        Endpoint("GET", "/ping", facts.ping, "Tell whether the process answers", answers=(), is_open=True),
        Endpoint("POST", "/ping", facts.ping, "Tell whether the process answers", answers=(), is_open=True),
        Endpoint("GET", "/version", facts.version, "Tell the version"),
        Endpoint("GET", "/metrics", facts.metrics, "Show the metrics in Prometheus' format", answers=("text/plain",)),
    ]

    @functools.cache
    def document() -> bytes:
        return json.dumps(openapi_document(endpoints, needs_key=keys.required)).encode()

    async def openapi(request: Request) -> Response:  # noqa: ARG001 - Starlette's form
        """GET /openapi.json; making it takes some 50 ms, for which nobody else shall wait."""
        return Response(await asyncio.to_thread(document), media_type="application/json")

    async def tell(request: Request, error: Exception) -> Response:
        return forms.response(error, request.scope)

    async def tell_http(request: Request, error: Exception) -> Response:
        """Starlette's own: there is no such path, or not with this method."""
        assert isinstance(error, HTTPException)
        refusal = BodyError(error.status_code, f"{request.method} {request.url.path[:128]}: {error.detail}")
        response = forms.response(refusal, request.scope)
        response.headers.update(error.headers or {})
        return response

    endpoints.append(Endpoint("GET", "/openapi.json", openapi, "Describe these endpoints"))
    return Starlette(
        routes=[each.route() for each in endpoints],
        middleware=[Middleware(KeyGate, keys, [each.path for each in endpoints if each.is_open], forms)],
        exception_handlers={
            RequestError: tell,
            BodyError: tell,
            HTTPException: tell_http,
            ClientGone: _tell_nobody,
            Exception: tell,  # the server logs it with its traceback
        },
    )


def _openai_error(error: Exception, scope: Scope) -> Response:  # noqa: ARG001 - see ErrorResponse
    return error_response(error)


def _chat_error(error: Exception, scope: Scope) -> Response:  # noqa: ARG001
    return error_response(error, CHAT_PARAMS)


async def _tell_nobody(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's form
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
