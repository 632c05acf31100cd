"""The HTTP application: routes of all APIs, and the one place that turns exceptions into responses."""

import asyncio
import functools
import json
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from frontend.access.api_keys import ApiKeys
from frontend.api.http.api_key_middleware import KeyGate
from frontend.api.http.disconnect import ClientGone
from frontend.api.http.endpoint import Api, Endpoint, ErrorForms
from frontend.api.http.errors import BodyError
from frontend.api.http.openapi import openapi_document
from frontend.errors import RequestError

_CLIENT_CLOSED_REQUEST = 499


def make_app(apis: Sequence[Api], keys: ApiKeys) -> Starlette:
    """Creates the ASGI application.

    Args:
        apis: the first API whose prefix matches a path formats its errors; the last one has an empty prefix.
        keys: API keys that clients must send.
    """
    forms = ErrorForms(apis)
    endpoints = [endpoint for api in apis for endpoint in api.endpoints]

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


async def _tell_nobody(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's form
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
