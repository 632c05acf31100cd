"""Endpoints and APIs: paths, their handlers, and the error format of each API."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from frontend.api.http.bodies import Body

STREAMED = ("application/json", "text/event-stream")
"""Media types of an answer that may be streamed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and what can be done there.

    Attributes:
        method: GET, POST or DELETE.
        path: as Starlette writes it, with `{name}` or `{name:path}` for a part that varies.
        handler: answers.
        summary: what it does, in a few words.
        body: what it takes; None: nothing.
        answers: media types of the answer; none: it has no body.
        is_open: it needs no API key.
        error: name of the form of its errors in the OpenAPI document.
        is_described: the OpenAPI document has it; a second spelling of a path is served without.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    body: type[Body] | None = None
    answers: tuple[str, ...] = ("application/json",)
    is_open: bool = False
    error: str = "Error"
    is_described: bool = True

    def route(self) -> Route:
        """The route that serves it."""
        return Route(self.path, self.handler, methods=[self.method])


ErrorResponse = Callable[[Exception, Scope], Response]
"""Makes the response that tells a client of an error."""


@dataclass(frozen=True, slots=True)
class Api:
    """One API.

    Attributes:
        prefix: begins all its paths. Errors below it have this API's form, on unknown paths too.
        endpoints: what it offers.
        error_response: makes its errors.
    """

    prefix: str
    endpoints: Sequence[Endpoint]
    error_response: ErrorResponse


class ErrorForms:
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
