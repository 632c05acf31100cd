"""Where a call came from, as a trace tells it: its name, its door's attributes and the caller's trace context.

Set at the door, read where the call's requests begin; the two are joined by the task that serves the call, so that
nothing between them has to carry it. Both doors are only wrapped while traces or lines for requests are on.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_MAX_NAME_CHARS = 128  # a path is whatever a client sends
_CONTEXT_HEADERS = ("traceparent", "tracestate")


class Origin(NamedTuple):
    """One call at its door.

    Attributes:
        name: of its spans.
        attributes: what OpenTelemetry's conventions say of such a call.
        context: W3C trace context, as the caller sent it.
    """

    name: str
    attributes: Mapping[str, str]
    context: Mapping[str, str]


_NO_ORIGIN = Origin("generate", {}, {})
_origin: ContextVar[Origin] = ContextVar("origin")


def current_origin() -> Origin:
    """Of the call that the running task serves."""
    return _origin.get(_NO_ORIGIN)


class GrpcOriginInterceptor(grpc.aio.ServerInterceptor):
    """Notes the origin of calls over gRPC."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's own handler, which gRPC runs in this task."""
        name = handler_call_details.method.lstrip("/")[:_MAX_NAME_CHARS]
        service, _, method = name.rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        _origin.set(Origin(name, attributes, _context(handler_call_details.invocation_metadata or ())))
        return await continuation(handler_call_details)


class HttpOriginMiddleware:
    """Notes the origin of calls over HTTP.

    Args:
        app: what is behind it.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """See ASGI."""
        path = scope["path"][:_MAX_NAME_CHARS]
        attributes = {"http.request.method": scope["method"], "url.path": path}
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        _origin.set(Origin(f"{scope['method']} {path}", attributes, _context(headers)))
        await self._app(scope, receive, send)


def _context(headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {name: value for name, value in headers if name in _CONTEXT_HEADERS and isinstance(value, str)}
