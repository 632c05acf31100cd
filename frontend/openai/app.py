"""The endpoints, and the one place where what goes wrong becomes a response."""

import asyncio
import functools
import json

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from frontend.access.api_keys import ApiKeys
from frontend.errors import RequestError
from frontend.openai.bodies import CompletionBody, DetokenizeBody
from frontend.openai.chat_bodies import ChatBody, TokenizeBody
from frontend.openai.disconnect import ClientGone
from frontend.openai.door import Door
from frontend.openai.endpoint import Endpoint
from frontend.openai.error_object import BodyError, error_response
from frontend.openai.facts import Facts
from frontend.openai.key_gate import KeyGate
from frontend.openai.openapi import openapi_document

_CHAT_PATH = "/v1/chat/completions"
_STREAMED = ("application/json", "text/event-stream")
_CLIENT_CLOSED_REQUEST = 499


def make_app(door: Door, facts: Facts, keys: ApiKeys) -> Starlette:
    """The ASGI application."""
    endpoints = [
        Endpoint("POST", "/v1/completions", door.completions, "Complete prompts", CompletionBody, _STREAMED),
        Endpoint("POST", _CHAT_PATH, door.chat_completions, "Answer a conversation", ChatBody, _STREAMED),
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

    endpoints.append(Endpoint("GET", "/openapi.json", openapi, "Describe these endpoints"))
    return Starlette(
        routes=[each.route() for each in endpoints],
        middleware=[Middleware(KeyGate, keys, [each.path for each in endpoints if each.is_open])],
        exception_handlers={
            RequestError: _tell,
            BodyError: _tell,
            HTTPException: _tell_http,
            ClientGone: _tell_nobody,
            Exception: _tell,  # the server logs it with its traceback
        },
    )


async def _tell(request: Request, error: Exception) -> Response:
    return error_response(error, chat=request.url.path == _CHAT_PATH)


async def _tell_http(request: Request, error: Exception) -> Response:
    """Starlette's own: there is no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    response = error_response(
        BodyError(error.status_code, f"{request.method} {request.url.path[:128]}: {error.detail}")
    )
    response.headers.update(error.headers or {})
    return response


async def _tell_nobody(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's form
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
