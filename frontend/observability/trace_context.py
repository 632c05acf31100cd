"""Origin of a call for traces and the request log: its name, attributes and W3C trace context.

The API layer sets it in a context variable of the task that serves the call; the request's observers read it. It is set
only while tracing or the request log is on.
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
    """Origin of one call.

    Attributes:
        name: name of its span.
        attributes: attributes by OpenTelemetry's semantic conventions.
        context: W3C trace context, as sent by the caller.
    """

    name: str
    attributes: Mapping[str, str]
    context: Mapping[str, str]


_NO_ORIGIN = Origin("generate", {}, {})
_origin: ContextVar[Origin] = ContextVar("origin")


def current_origin() -> Origin:
    """Returns the origin of the call that the current task serves."""
    return _origin.get(_NO_ORIGIN)


class GrpcOriginInterceptor(grpc.aio.ServerInterceptor):
    """Sets the origin of gRPC calls."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Sets the origin; gRPC runs the handler in this task."""
        name = handler_call_details.method.lstrip("/")[:_MAX_NAME_CHARS]
        service, _, method = name.rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        _origin.set(Origin(name, attributes, _context(handler_call_details.invocation_metadata or ())))
        return await continuation(handler_call_details)


class HttpOriginMiddleware:
    """Sets the origin of HTTP requests.

    Args:
        app: the application.
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
