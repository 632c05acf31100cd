"""The routes, and the one place where what goes wrong becomes a response."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.access.api_keys import ApiKeys
from frontend.errors import RequestError
from frontend.openai.disconnect import ClientGone
from frontend.openai.door import Door
from frontend.openai.error_object import BodyError, error_response
from frontend.openai.facts import Facts
from frontend.openai.key_gate import KeyGate

_CHAT_PATH = "/v1/chat/completions"
_CLIENT_CLOSED_REQUEST = 499


def make_app(door: Door, facts: Facts, keys: ApiKeys) -> Starlette:
    """The ASGI application."""
    get, post = ["GET"], ["POST"]
    return Starlette(
        routes=[
            Route("/v1/completions", door.completions, methods=post),
            Route(_CHAT_PATH, door.chat_completions, methods=post),
            Route("/v1/models", facts.models, methods=get),
            Route("/v1/models/{model:path}", facts.model, methods=get),
            Route("/tokenize", facts.tokenize, methods=post),
            Route("/detokenize", facts.detokenize, methods=post),
            Route("/health", facts.health, methods=get),
            Route("/version", facts.version, methods=get),
            Route("/metrics", facts.metrics, methods=get),
        ],
        middleware=[Middleware(KeyGate, keys)],
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
