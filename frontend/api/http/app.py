"""The HTTP application: routes of all APIs, and the one place that turns exceptions into responses."""

import asyncio
import functools
import json
from collections.abc import Collection, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from frontend.access.api_keys import Access
from frontend.api.http.api_key_middleware import ApiKeyMiddleware
from frontend.api.http.disconnect import ClientGone
from frontend.api.http.endpoint import Api, Endpoint, ErrorFormats
from frontend.api.http.errors import BodyError
from frontend.api.http.openapi import openapi_document
from frontend.errors import RequestError

_CLIENT_CLOSED_REQUEST = 499


def make_app(apis: Sequence[Api], access: Access) -> Starlette:
    """Creates the ASGI application.

    Args:
        apis: the first API whose prefix matches a path formats its errors; the last one has an empty prefix.
        access: API keys that clients must send.
    """
    formats = ErrorFormats(apis)
    endpoints = [endpoint for api in apis for endpoint in api.endpoints]
    paths = {endpoint.path for endpoint in endpoints}

    @functools.cache
    def document() -> bytes:
        return json.dumps(openapi_document(endpoints, needs_key=access.clients.required)).encode()

    async def openapi(request: Request) -> Response:  # noqa: ARG001 - Starlette's signature
        """GET /openapi.json; made in a thread because it takes 50 ms."""
        return Response(await asyncio.to_thread(document), media_type="application/json")

    async def respond(request: Request, error: Exception) -> Response:
        return formats.response(error, request.scope)

    async def respond_http(request: Request, error: Exception) -> Response:
        """Starlette's errors: unknown path or method."""
        assert isinstance(error, HTTPException)
        path = request.url.path
        hint = f"; did you mean {meant}?" if error.status_code == 404 and (meant := _meant(path, paths)) else ""
        refusal = BodyError(error.status_code, f"{request.method} {path[:128]}: {error.detail}{hint}")
        response = formats.response(refusal, request.scope)
        response.headers.update(error.headers or {})
        return response

    endpoints.append(Endpoint("GET", "/openapi.json", openapi, "Describe the endpoints"))
    app = Starlette(
        routes=[each.route() for each in endpoints],
        middleware=[
            Middleware(
                ApiKeyMiddleware,
                access,
                [each.path for each in endpoints if each.is_open],
                [each.path for each in endpoints if each.is_admin],
                formats,
            )
        ],
        exception_handlers={
            RequestError: respond,
            BodyError: respond,
            HTTPException: respond_http,
            ClientGone: _client_closed_request,
            Exception: respond,  # the server logs it with its traceback
        },
    )
    # Starlette would redirect /health/ to http://HOST/health, out of the TLS and the path prefix of a proxy.
    app.router.redirect_slashes = False
    return app


def _meant(path: str, known: Collection[str]) -> str | None:
    """Returns the known path of a client whose base URL lacks /v1, or that adds a second one, or slashes."""
    bare = "/" + "/".join(filter(None, path.split("/")))
    nearby = (bare, f"/v1{bare}", bare.removeprefix("/v1"))
    return next((near for near in nearby if near != path and near in known), None)


async def _client_closed_request(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's signature
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
