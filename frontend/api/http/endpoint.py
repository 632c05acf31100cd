"""Endpoints and APIs: paths, their handlers, and the error format of each API."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from frontend.api.http.bodies import Body

STREAMED = ("application/json", "text/event-stream")
"""Media types of a response that may be streamed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    Attributes:
        method: GET, POST or DELETE.
        path: in Starlette's syntax, with `{name}` or `{name:path}` for parameters.
        handler: handles requests.
        summary: description for the OpenAPI document.
        body: model of the request body; None: there is none.
        answers: media types of the response; empty: no body.
        is_open: whether it needs no API key.
        is_admin: whether it needs a key for administration.
        error: schema of its errors in the OpenAPI document.
        is_described: whether the OpenAPI document lists it; alternative spellings of a path are left out.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    body: type[Body] | None = None
    answers: tuple[str, ...] = ("application/json",)
    is_open: bool = False
    is_admin: bool = False
    error: str = "Error"
    is_described: bool = True

    def route(self) -> Route:
        """Returns Starlette's route."""
        return Route(self.path, self.handler, methods=[self.method])


ErrorResponse = Callable[[Exception, Scope], Response]
"""Makes the response for an error."""


@dataclass(frozen=True, slots=True)
class Api:
    """One API.

    Attributes:
        prefix: prefix of its paths; errors below it have this API's format, also on unknown paths.
        endpoints: its endpoints.
        error_response: formats its errors.
    """

    prefix: str
    endpoints: Sequence[Endpoint]
    error_response: ErrorResponse


class ErrorFormats:
    """Formats each error as the API that the client called does.

    Args:
        apis: the first one whose prefix matches the path is used; the last one has an empty prefix.
    """

    def __init__(self, apis: Sequence[Api]) -> None:
        self._apis = apis

    def response(self, error: Exception, scope: Scope) -> Response:
        """Returns the response for an error of the request in `scope`."""
        path = scope["path"]
        api = next(api for api in self._apis if not api.prefix or f"{path}/".startswith(f"{api.prefix}/"))
        return api.error_response(error, scope)
