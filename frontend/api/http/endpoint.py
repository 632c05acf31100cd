"""An endpoint as one row: what serves it, and what its description says of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
